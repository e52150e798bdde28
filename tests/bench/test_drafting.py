"""`bench drafting`: on a toy, so that what is timed is known to be what it says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragflash.bench import drafting
from ragflash.bench.__main__ import main
from ragflash.bench.draft_projection import project
from ragflash.bench.draft_tasks import TASKS, Sizes, copied_share, make_document
from ragflash.bench.record import Series, build, read_series, summarise
from ragflash.cli import app
from ragflash.engine.build import start_engine
from ragflash.errors import Conflict, EngineError, SettingInvalid
from tests.models.families import FAMILIES
from tests.models.toy_files import TOKENS, write_gguf

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs/results/drafting.json"
PROSE = "Seals are replaced every year; the pressure is kept at 16 bar. " * 60
ROWS = (("copy", 600), ("free", 600))
SIZES = Sizes(output_tokens=dict.fromkeys(TASKS, 6), question_tokens=250, list_rows=3)
PLAN = drafting.Plan(prose=PROSE, rows=ROWS, sizes=SIZES)
BEGUN = {"command": "bench", "date": "today", "commit": "abc", "load_1m": 0.5}
SOURCES = {"lookup", "tree", "auto"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    llama = FAMILIES["llama"]
    tensors = llama.tensors(llama.build(seed=1, vocab_size=len(TOKENS)))
    path = tmp_path_factory.mktemp("made") / "toy.gguf"
    return write_gguf(path, llama.architecture, llama.metadata, tensors, tokenizer=True)


@pytest.fixture
def start(toy):
    options = {"max_slots": 1, "threads": 1, "verify_rows": 8, "kv_bytes": 64 << 20}
    return lambda: start_engine(toy, device="cpu", dtype="float32", drafts=True, **options)


@pytest.fixture(scope="module")
def results(toy):
    """What was kept after each row, the last twice."""
    kept = []
    options = {"max_slots": 1, "threads": 1, "verify_rows": 8, "kv_bytes": 64 << 20}
    found = drafting.measure(
        PLAN,
        lambda: start_engine(toy, device="cpu", dtype="float32", drafts=True, **options),
        lambda *_: None,
        kept.append,
        begun=BEGUN,
    )
    return [json.loads(json.dumps(build("drafting", BEGUN, one))) for one in (*kept, found)]


def test_every_row_has_every_source_against_plain_decoding(results):
    series = read_series(results[-1])
    for task, context in ROWS:
        for source in SOURCES:
            speed = series[f"{task}_{context}_{source}_tok_s"]
            assert speed.against == f"{task}_{context}_off_tok_s"
            assert len(speed.values) == SIZES.rounds
            steps = series[f"{task}_{context}_{source}_tokens_per_step"]
            rows = series[f"{task}_{context}_{source}_rows_per_step"]
            assert all(1 <= value <= 8 for value in (*steps.values, *rows.values))
    for row in results[-1]["parameters"]["rows"]:
        assert row["output_tokens"] == 6
        assert row["same_output"] == dict.fromkeys(("off", *SOURCES), True)
        assert 400 <= row["prompt_tokens"] <= 600
        for source in SOURCES:
            count = row["drafts"][source]
            (per_step,) = {*series[f"{row['task']}_600_lookup_tokens_per_step"].values}
            assert source != "lookup" or 5 / count["steps"] == per_step


def test_what_there_is_is_kept_after_every_row(results):
    first, second, last = results
    assert [row["task"] for row in first["parameters"]["rows"]] == ["copy"]
    assert "copy_600_auto_tok_s" in first["summary"]
    assert "free_600_auto_tok_s" not in first["summary"]
    assert first["worst_row_ratio"] == first["summary"]["copy_600_auto_tok_s"]["ratio"]["high"]
    assert second == last | {"load_1m_after": second["load_1m_after"]}


def test_a_result_says_which_rows_of_the_whole_it_lacks(results, tmp_path):
    assert results[-1]["complete"] is False
    assert results[-1]["missing"] == [f"{task}_{at}" for task, at in drafting.ALL_ROWS]
    assert len(drafting.ALL_ROWS) == 18
    found = drafting._Found(PLAN, None)
    for task, context in drafting.ALL_ROWS:
        found.rows[task, context] = {"task": task, "context_tokens": context, "copied_share": 0}
    result = build("drafting", BEGUN, found.measurement())
    assert (result["complete"], result["missing"]) == (True, [])


def test_a_later_run_goes_on_with_the_rows_that_lack(results, start):
    kept = []
    again = drafting.measure(
        PLAN, start, lambda *_: None, kept.append, begun=BEGUN, earlier=results[0]
    )
    assert len(kept) == 1
    result = json.loads(json.dumps(build("drafting", BEGUN, again)))
    assert [row["task"] for row in result["parameters"]["rows"]] == ["copy", "free"]
    copies = {name: one for name, one in results[0]["samples"].items() if name.startswith("copy_6")}
    assert copies.items() <= result["samples"].items()
    assert result["samples"].keys() == results[-1]["samples"].keys()
    assert [run["command"] for run in result["parameters"]["earlier_runs"]] == ["bench"]


def test_a_result_with_all_rows_starts_no_engine(results):
    again = drafting.measure(
        PLAN, lambda: pytest.fail("started"), lambda *_: None, begun=BEGUN, earlier=results[-1]
    )
    assert again.series.keys() == results[-1]["samples"].keys()


def test_rows_of_a_large_model_lack_until_they_are_there(results):
    earlier = results[-1] | {"missing": ["free_999", "large_lookup_0"]}
    again = drafting.measure(
        PLAN, lambda: pytest.fail("started"), lambda *_: None, begun=BEGUN, earlier=earlier
    )
    assert "large_lookup_0" in again.missing
    assert "free_999" not in again.missing


def test_another_result_is_not_gone_on_with(results, start):
    def go_on(earlier, plan=PLAN):
        drafting.measure(plan, start, lambda *_: None, begun=BEGUN, earlier=earlier)

    with pytest.raises(Conflict, match="commit 'def' there, 'abc' here"):
        go_on(results[0] | {"commit": "def"})
    with pytest.raises(Conflict, match="sha256"):
        go_on(results[0] | {"model": {"file": "toy.gguf", "sha256": "0"}})
    with pytest.raises(Conflict, match="rounds 7 there, 8 here"):
        go_on(results[0], replace(PLAN, sizes=replace(SIZES, rounds=8)))


def test_headlines_follow_from_the_samples_in_the_file(results):
    result = results[-1]
    series = read_series(result)
    assert result["summary"] == summarise(series)
    again = drafting.sum_up(series, result["parameters"]["rows"], "cpu")
    assert {name: series[name] for name in again} == again
    uppers = [
        figures["ratio"]["high"]
        for name, figures in result["summary"].items()
        if name.endswith("auto_tok_s")
    ]
    assert len(uppers) == 2
    assert result["worst_row_ratio"] == min(uppers)


def rows_of(copied):
    return [{"task": "copy", "context_tokens": 7, "copied_share": copied}]


def test_copies_are_only_what_is_copied():
    series = {
        "copy_7_off_tok_s": Series("tokens/s", [10.0] * 7),
        "copy_7_auto_tok_s": Series("tokens/s", [30.0] * 7, against="copy_7_off_tok_s"),
    }
    found = drafting.sum_up(series, rows_of(0.9), "gpu")
    assert found["copy_speedup_gpu"].values == [3.0] * 7
    assert found["worst_row_ratio"].values == [3.0]
    assert drafting.sum_up(series, rows_of(0.89), "gpu").keys() == {"worst_row_ratio"}


def test_the_result_of_another_device_is_kept_whole(results):
    other = {"samples": {"copy_speedup_gpu": {"unit": "times", "values": [4.0], "against": None}}}
    options = {"begun": BEGUN, "earlier": results[-1]}
    found = drafting.measure(PLAN, pytest.fail, lambda *_: None, beside=other, **options)
    assert found.parameters["beside"] == other
    assert found.series["copy_speedup_gpu"].values == [4.0]
    later = options | {"earlier": json.loads(json.dumps(build("drafting", BEGUN, found)))}
    again = drafting.measure(PLAN, pytest.fail, lambda *_: None, **later)
    assert again.parameters["beside"] == other


@pytest.mark.parametrize(
    ("tokens", "share"),
    [((1, 2, 3, 4, 9, 9), 4 / 6), ((2, 3, 4, 5, 6), 1.0), ((1, 2, 3, 9), 0.0), ((), 0.0)],
)
def test_a_copy_is_runs_of_the_source(tokens, share):
    assert copied_share(tokens, (1, 2, 3, 4, 5, 6)) == share


def test_a_list_has_every_part_once():
    document = make_document(PROSE, 2000, 14, lambda text: [*text.encode()])
    parts = document.split("Parts in stock:\n")[1].split("\n")[:14]
    names = [part.split(", ")[0].split(". ")[1] for part in parts]
    assert len({*names}) == 14
    assert parts[13].startswith("14. ")


def test_a_document_that_is_too_short_or_not_remembered_ends_it(start):
    with pytest.raises(EngineError, match="a text of more than"):
        drafting.measure(replace(PLAN, prose="Short."), start, lambda *_: None)
    sizes = replace(SIZES, question_tokens=100, list_rows=2)
    with pytest.raises(EngineError, match="the question alone"):
        drafting.measure(replace(PLAN, sizes=sizes), start, lambda *_: None)


def test_a_plan_has_what_is_selected():
    whole = drafting.plan_of(PROSE)
    assert tuple(whole.rows) == drafting.ALL_ROWS
    assert whole.sizes.output_tokens["copy"] == 192
    some = drafting.plan_of(PROSE, tasks=["free", "copy"], contexts=[512], output_tokens=40)
    assert some.rows == [("copy", 512), ("free", 512)]
    assert {*some.sizes.output_tokens.values()} == {40}
    assert drafting.plan_of(PROSE, tasks=["none"]).rows == []
    assert tuple(drafting.plan_of(PROSE, quick=True).rows) == drafting.QUICK
    with pytest.raises(SettingInvalid, match="task poem: known are copy, "):
        drafting.plan_of(PROSE, tasks=["poem"])
    with pytest.raises(SettingInvalid, match="6 rounds"):
        drafting.plan_of(PROSE, rounds=6)


@pytest.mark.parametrize("text", ["{}", '{"bench": "lookup"}', "[]", "no JSON"])
def test_only_results_of_this_benchmark_are_read(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(Conflict, match=r"other\.json is no result of "):
        drafting.read(tmp_path / "other.json")


def test_the_documents_show_the_result_that_is_kept():
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert drafting.markdown(result) in (ROOT / "docs/drafting.md").read_text(encoding="utf-8")
    for one in filter(None, (result, result["parameters"].get("beside"))):
        parameters, series = one["parameters"], read_series(one)
        assert one["summary"] == summarise(series)
        assert project(series, parameters["rows"]) == parameters.get("projected", [])
        device = "cpu" if parameters["device"] == "cpu" else "gpu"
        again = drafting.sum_up(series, parameters["rows"], device)
        assert {name: series[name] for name in again} == again


def test_it_runs_where_there_is_no_server_to_import(toy, tmp_path, monkeypatch):
    out, prose = tmp_path / "drafting.json", tmp_path / "prose.txt"
    prose.write_text(PROSE)
    monkeypatch.setattr(drafting, "Sizes", lambda **lengths: replace(SIZES, **lengths))
    given = ["--model", toy, "--device", "cpu", "--task", "free", "--ctx", 600, "--out", out]
    given += ["--output-tokens", 3, "--text", prose, "--commit", "abc"]
    monkeypatch.setattr("sys.argv", ["bench", "drafting", *map(str, given)])
    main()
    result = json.loads(out.read_text())
    assert result["command"].startswith("ragflash bench drafting --model")
    assert result["worst_row_ratio"] > 0
    monkeypatch.setattr("sys.argv", ["bench", "drafting", *map(str, given), "--resume"])
    main()
    assert json.loads(out.read_text())["samples"] == result["samples"]


def test_the_command_writes_what_there_is_and_goes_on_with_it(toy, tmp_path):
    out = tmp_path / "drafting.json"
    command = ["bench", "drafting", "--model", str(toy), "--device", "cpu", "--task", "none"]
    alone = CliRunner().invoke(app, [*command, "--resume"])
    assert alone.exit_code == 2
    assert "name its file with --out" in alone.output
    for options in ([], ["--resume"]):
        ran = CliRunner().invoke(app, [*command, "--out", str(out), *options])
        assert ran.exit_code == 0, ran.output
    result = json.loads(out.read_text())
    assert result["complete"] is False
    assert len(result["parameters"]["earlier_runs"]) == 1
