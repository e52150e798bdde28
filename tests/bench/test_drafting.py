"""`bench drafting`: on a toy, so that what is timed is known to be what it says."""

import json
from pathlib import Path

import pytest

from ragflash.bench import drafting
from ragflash.bench.__main__ import main
from ragflash.bench.record import Series, build, read_series, summarise
from ragflash.engine.build import start_engine
from ragflash.errors import EngineError
from tests.models.families import FAMILIES
from tests.models.toy_files import TOKENS, write_gguf

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs/results/drafting.json"
PROSE = "Seals are replaced every year; the pressure is kept at 16 bar. " * 60
TOY = {"question_tokens": 250, "list_rows": 3}
SIZES = drafting.Sizes(contexts=(600,), output_tokens=10, tasks=("copy", "free"), **TOY)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    llama = FAMILIES["llama"]
    tensors = llama.tensors(llama.build(seed=1, vocab_size=len(TOKENS)))
    path = tmp_path_factory.mktemp("made") / "toy.gguf"
    return write_gguf(path, llama.architecture, llama.metadata, tensors, tokenizer=True)


@pytest.fixture(scope="module")
def client(toy):
    options = {"max_slots": 1, "threads": 1, "verify_rows": 8, "kv_bytes": 64 << 20}
    client = start_engine(toy, device="cpu", dtype="float32", drafts=True, **options)
    yield client
    client.close()


@pytest.fixture(scope="module")
def measured(client):
    return drafting.measure(client, PROSE, SIZES, lambda *_: None)


def test_every_row_has_every_source_against_plain_decoding(measured):
    sources = {"lookup", "tree", "auto"}
    for task in SIZES.tasks:
        for source in sources:
            speed = measured.series[f"{task}_600_{source}_tok_s"]
            assert speed.against == f"{task}_600_off_tok_s"
            assert len(speed.values) == SIZES.rounds
            steps = measured.series[f"{task}_600_{source}_tokens_per_step"]
            assert all(1 <= value <= 8 for value in steps.values)
    for row in measured.parameters["rows"]:
        assert row["output_tokens"] == 10
        assert row["same_output"] == dict.fromkeys(("off", *sources), True)
        assert 400 <= row["prompt_tokens"] <= 600


def test_headlines_follow_from_the_samples_in_the_file(measured):
    result = json.loads(json.dumps(build("drafting", {"command": "bench"}, measured)))
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


def test_the_result_of_another_device_is_kept_whole(client):
    other = {"samples": {"copy_speedup_gpu": {"unit": "times", "values": [4.0], "against": None}}}
    sizes = drafting.Sizes(contexts=(600,), output_tokens=3, tasks=("free",), **TOY)
    found = drafting.measure(client, PROSE, sizes, lambda *_: None, beside=other)
    assert found.parameters["beside"] == other
    assert found.series["copy_speedup_gpu"].values == [4.0]


@pytest.mark.parametrize(
    ("tokens", "share"),
    [((1, 2, 3, 4, 9, 9), 4 / 6), ((2, 3, 4, 5, 6), 1.0), ((1, 2, 3, 9), 0.0), ((), 0.0)],
)
def test_a_copy_is_runs_of_the_source(tokens, share):
    assert drafting.copied_share(tokens, (1, 2, 3, 4, 5, 6)) == share


def test_a_document_that_is_too_short_or_not_remembered_ends_it(client):
    with pytest.raises(EngineError, match="a text of more than"):
        drafting.measure(client, "Short.", SIZES, lambda *_: None)
    sizes = drafting.Sizes(contexts=(600,), tasks=("free",), question_tokens=100, list_rows=2)
    with pytest.raises(EngineError, match="the question alone"):
        drafting.measure(client, PROSE, sizes, lambda *_: None)


def test_the_table_has_every_row_of_both_devices(measured):
    result = json.loads(json.dumps(build("drafting", {"command": "bench"}, measured)))
    speed = result["summary"]["copy_600_lookup_tok_s"]
    steps = result["summary"]["copy_600_lookup_tokens_per_step"]["median"]
    alone = drafting.markdown(result).split("\n")
    assert len(alone) == 2 + 2 * 3
    plain = result["summary"]["copy_600_off_tok_s"]["median"]
    assert alone[2].startswith("| cpu | copy | 600 |")
    assert f"| `lookup` | {steps:.2f} | {plain:.1f} | {speed['median']:.1f} |" in alone[2]
    result["parameters"]["beside"] = {**result}
    assert drafting.markdown(result).split("\n") == alone + alone[2:]


def test_the_documents_show_the_result_that_is_kept():
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert drafting.markdown(result) in (ROOT / "docs/drafting.md").read_text(encoding="utf-8")
    for one in filter(None, (result, result["parameters"].get("beside"))):
        assert one["summary"] == summarise(read_series(one))


def test_it_runs_where_there_is_no_server_to_import(toy, tmp_path, monkeypatch):
    out, prose = tmp_path / "drafting.json", tmp_path / "prose.txt"
    prose.write_text(PROSE)
    sizes = drafting.Sizes(contexts=(600,), output_tokens=3, tasks=("free",), **TOY)
    monkeypatch.setattr(drafting, "QUICK", sizes)
    given = ["--model", toy, "--device", "cpu", "--quick", "--text", prose, "--out", out]
    monkeypatch.setattr("sys.argv", ["bench", "drafting", *map(str, given)])
    main()
    result = json.loads(out.read_text())
    assert result["command"].startswith("ragflash bench drafting --model")
    assert result["worst_row_ratio"] > 0
