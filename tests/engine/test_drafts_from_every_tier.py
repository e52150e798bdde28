"""Whoever drafts, a restored prompt answers as a computed one does, and is drafted alike."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from tests.engine.drafted import write_drafter, write_target, write_with_mtp
from tests.engine.drafted_tiers import Case, Setting, Told, asking
from tests.models.families import FAMILIES
from tests.models.toy_files import write_toy
from tests.sessions.samples import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
# Of documents: they end inside a page, at its edges, and in the second and third block of a grid.
LENGTHS = (150, 202, 458, 790)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[[str], str]:
    folder, made = tmp_path_factory.mktemp("toys"), dict[str, Path]()

    def file(name: str) -> str:
        if name not in made:
            path = folder / name
            if name.endswith("drafter"):
                made[name] = write_drafter(path, is_constant=name != "drafter")
            elif name in {"qwen35", "right"}:
                made[name] = write_with_mtp(path, is_right=name == "right")
            elif name == "constant":
                made[name] = write_target(path, "llama", is_constant=True)
            else:
                made[name] = write_toy(path, FAMILIES[name])
        return str(made[name])

    return file


@pytest.fixture
def sessions() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="ragflash-") as name:
        yield Path(name)


def in_new_process(setting: Setting, sessions: Path) -> list[Told]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.engine.drafted_tiers", sessions, setting.spelled],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [Told(**json.loads(line)) for line in result.stdout.splitlines()]


def in_new_engine(setting: Setting, sessions: Path) -> list[Told]:
    with asking(setting, sessions) as asker:
        return [asker.ask(case) for case in setting.cases]


def ask_from_every_tier(
    setting: Setting,
    sessions: Path,
    restart: Callable[[Setting, Path], Iterable[Told]],
) -> dict[Case, list[Told]]:
    """Ask each case plainly, and from every tier: all answers are the same, and all drafts."""
    cases, found = setting.cases, dict[Case, list[Told]]()
    with asking(setting, None, drafts=False) as plain:
        expected = [plain.ask(case, "off", cache=False) for case in cases]
    with asking(setting, sessions) as asker:
        for case in cases:
            asked = found[case] = [asker.ask(case), asker.ask(case)]
            asker.evict()
            asked.append(asker.ask(case))
    for case, told in zip(cases, restart(setting, sessions), strict=True):
        found[case].append(told)
    for case, answer in zip(cases, expected, strict=True):
        first, *others = found[case]
        assert [told.tier for told in found[case]] == ["none", "device", "file", "file"]
        assert [told.tokens for told in found[case]] == [answer.tokens] * (1 + len(others))
        if case.mode != "auto":  # which goes by what steps took
            assert [told.drafting for told in others] == [first.drafting] * len(others)
    return found


def cases_of(modes: Iterable[str], lengths: Iterable[int]) -> tuple[Case, ...]:
    """Ask in each mode about each length, of kinds in turn, every other time after turns."""
    kinds = cycle(("free", "quote", "sampled"))
    asked = [(mode, next(kinds), length) for mode in modes for length in lengths]
    return tuple(Case(*each, has_turns=at % 2 == 0) for at, each in enumerate(asked))


def test_drafts_of_every_source_are_the_same_from_every_tier(files, sessions):
    cases = cases_of(("tree", "lookup", "mtp", "dflash", "auto"), [203])
    setting = Setting(files("qwen35"), files("drafter"), "tq3_0", cases)
    found = ask_from_every_tier(setting, sessions, in_new_engine)
    sources = {case.mode: {one[0] for one in asked[-1].drafts} for case, asked in found.items()}
    assert sources["mtp"] == {"mtp"}
    assert sources["dflash"] == {"dflash"}
    assert "dflash" in sources["tree"]


@pytest.mark.parametrize(
    ("name", "modes"), [("constant", ("lookup", "tree", "dflash")), ("right", ("mtp",))]
)
def test_the_first_step_after_a_restore_takes_its_draft(files, sessions, name, modes):
    cases = tuple(Case(mode, "short", 203, has_turns=False) for mode in modes)
    drafter = files("constant drafter") if name == "constant" else None
    setting = Setting(files(name), drafter, "tq3_0", cases)
    found = ask_from_every_tier(setting, sessions, in_new_engine)
    for case, asked in found.items():
        for told in asked:
            # Who reads rows of the model has none of the prompt's end before its last step.
            assert len(told.proposals) == (1 if case.mode in {"lookup", "tree"} else 2)
            ((source, _, num_accepted),) = told.drafts
            assert num_accepted >= 2
            assert source == ("lookup" if case.mode == "tree" else case.mode)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_model_copies_in_the_first_step_after_a_restore(packaged_model_path, sessions):
    cases = tuple(Case(mode, "copy", 0, has_turns=True) for mode in ("lookup", "tree"))
    setting = Setting(str(packaged_model_path), None, "auto", cases)
    for asked in ask_from_every_tier(setting, sessions, in_new_process).values():
        for told in asked:
            assert len(told.proposals) == 1
            ((source, _, num_accepted),) = told.drafts
            assert source == "lookup"
            assert num_accepted >= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen35"])
@pytest.mark.parametrize(("drafter", "kv_format"), [(None, "auto"), ("drafter", "tq3_0")])
def test_the_whole_matrix_after_a_restart(files, sessions, name, drafter, kv_format):
    """Attention alone, with a window, and recurrent layers; trees of two kinds."""
    modes = ["tree", "auto", "lookup" if drafter is None else "dflash"]
    modes += ["mtp"] if name == "qwen35" else []
    cases = cases_of(modes, LENGTHS)
    setting = Setting(files(name), drafter and files(drafter), kv_format, cases)
    found = ask_from_every_tier(setting, sessions, in_new_process)
    drafted = {case.mode for case, asked in found.items() if asked[-1].drafts}
    assert drafted == {*modes}
