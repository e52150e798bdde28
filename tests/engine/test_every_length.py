"""A warm prompt answers as a cold one, bit for bit, at every length modulo a page and a block."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.sweep import Sweep, Told, asking
from tests.models.families import FAMILIES
from tests.models.toy_files import write_toy
from tests.sessions.samples import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
GRID = 512
# What is asked after a document and before the answer; so a prompt ends at an edge, too.
QUESTION = 23


def around(edge: int) -> tuple[int, ...]:
    """Ends of documents where they, or their prompts, end at an edge or beside it."""
    return tuple(at + by for at in (edge - QUESTION, edge) for by in range(-3, 4))


# All exact; in blocks, of which the last edge lets a second page be packed.
EVERY = {
    "auto": (*range(300, 300 + 256), *around(3 * 256)),
    "tq3_0": (*range(2 * GRID - 28, 2 * GRID - 28 + 256), *around(GRID), *around(3 * GRID)),
}
SOME = {
    "auto": (256, 300, 511, 512, 513),
    "tq3_0": (2 * GRID - 1, 2 * GRID, 2 * GRID + 1, 1279),
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("toys"), dict[str, Path]()

    def toy(name: str) -> Path:
        if name not in made:
            made[name] = write_toy(folder / f"{name}.gguf", FAMILIES[name], context_length=2048)
        return made[name]

    return toy


@pytest.fixture
def sessions() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="ragflash-") as name:
        yield Path(name)


def in_new_process(sessions: Path, model: Path, sweep: Sweep) -> list[Told]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.engine.sweep", sessions, model, sweep.spelled],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [told_of(line) for line in result.stdout.splitlines()]


def told_of(line: str) -> Told:
    fields = json.loads(line)
    return Told(**fields | {name: tuple(fields[name]) for name in ("tokens", "bits")})


def in_new_engine(sessions: Path, model: Path, sweep: Sweep) -> list[Told]:
    with asking(model, sessions, sweep) as asker:
        found = list(asker.replay())
        assert asker.engine.stats().evictions > 0
    return found


def assert_warm_is_cold(
    model: Path,
    sessions: Path,
    sweep: Sweep,
    restart: Callable[[Path, Path, Sweep], Iterable[Told]],
) -> None:
    answers: dict[int, tuple[int, ...]] = {}
    sweep = replace(sweep, answers=answers)
    cold = dict[int, Told]()
    with asking(model, sessions, sweep) as asker:
        for end in sweep.ends:
            cold[end] = asker.ask(end)
            cold[end].assert_computed()
            assert cold[end].prompt == end + QUESTION
            answers[end] = cold[end].tokens
            warm = asker.ask(end)
            warm.assert_reused("device")
            assert warm.answer == cold[end].answer
    found, drafted = iter(restart(sessions, model, sweep)), dict[int, Told]()
    for end in sweep.ends:
        warm, drafted[end], evicted = next(found), next(found), next(found)
        warm.assert_reused("file")
        assert warm.answer == cold[end].answer
        drafted[end].assert_reused("device")
        assert drafted[end].tokens == cold[end].tokens
        evicted.assert_reused("file")
        assert evicted.answer == drafted[end].answer
        assert (evicted.drafted, evicted.accepted) == (drafted[end].drafted, drafted[end].accepted)
    assert next(found, None) is None
    assert sum(told.drafted - told.accepted for told in drafted.values()) > 0
    assert sum(told.accepted for told in drafted.values()) > 0
    with asking(model, None, sweep) as asker:  # rows side by side may round as one alone does not
        for end in sweep.ends[:: 1 + len(sweep.ends) // 16]:
            computed = asker.ask(end, sweep.shape(end), cache=False)
            assert (computed.tier, computed.drafted) == ("none", drafted[end].drafted)
            assert computed.answer == drafted[end].answer


@pytest.mark.parametrize("kv_format", SOME)
def test_some_lengths_answer_alike_from_every_tier(toys, kv_format, sessions):
    sweep = Sweep(kv_format, SOME[kv_format])
    assert_warm_is_cold(toys("qwen35"), sessions, sweep, in_new_engine)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kv_format", EVERY)
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen35"])
def test_every_length_answers_alike_from_every_tier(toys, name, kv_format, sessions):
    """Attention alone, with a window, and recurrent layers between attention."""
    assert {end % 256 for end in EVERY[kv_format]} == {*range(256)}
    sweep = Sweep(kv_format, EVERY[kv_format])
    assert_warm_is_cold(toys(name), sessions, sweep, in_new_process)
