"""`bench gpu`: on a toy and a CPU, so that what is timed on a card is known to be what it says."""

import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ragflash.bench import gpu, llama_bench
from ragflash.bench.__main__ import main
from ragflash.bench.filler import Filler
from ragflash.bench.gpu_session import Figures, Session, Sizes
from ragflash.bench.record import build, read_series, summarise
from ragflash.bench.stub_drafter import StubDrafter
from ragflash.engine.build import start_engine
from ragflash.engine.cards import Card
from ragflash.errors import EngineError, SettingInvalid
from tests.bench.test_make_model import write_toy

SIZES = Sizes(prefill=40, depth=300, whole=350, decode=8, steps=1, runs=1, small_prefill=30)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("made") / "toy.gguf")


@pytest.fixture(scope="module")
def plan(toy):
    return gpu.Plan(toy, small=toy, device="cpu", kv_format="auto", sizes=SIZES)


@pytest.fixture(scope="module")
def measured(plan):
    kept = []
    measurement = gpu.measure(plan, lambda *_: None, kept.append)
    return measurement, kept


def test_every_row_is_there(measured):
    names = set(measured[0].series)
    for depth in (0, 300):
        assert {
            f"decode_tok_s_depth{depth}",
            f"verify16_ms_depth{depth}",
            f"verify16_rejected_ms_depth{depth}",
            f"verify21_ms_depth{depth}",
            f"verify21_ratio_to_verify16_depth{depth}",
            f"prefill_tok_s_40_depth{depth}",
        } <= names
    assert {"ttft_350_s", "small_decode_tok_s", "small_prefill_tok_s_30"} <= names
    assert not any("llamacpp" in name or "peak" in name for name in names)


def test_what_there_is_is_kept_after_every_row(measured):
    sizes = [len(one.series) for one in measured[1]]
    assert len(sizes) == len(gpu.ROWS)
    assert sizes == sorted(sizes)
    assert measured[1][-1].series == measured[0].series


def test_drafts_that_are_right_are_taken_and_others_are_not(measured):
    for depth in (0, 300):
        for rows in (16, 21):
            name = f"verify{rows}{{}}_accepted_share_depth{depth}"
            assert measured[0].series[name.format("")].values == [1.0]
            assert measured[0].series[name.format("_rejected")].values == [0.0]
            assert len(measured[0].series[f"verify{rows}_ms_depth{depth}"].values) >= 1


def test_the_result_has_the_medians_by_name(measured):
    result = json.loads(json.dumps(build("gpu", {"command": "ragflash bench gpu"}, measured[0])))
    assert result["summary"] == summarise(read_series(result))
    for name, figures in result["summary"].items():
        assert result[name] == figures["median"]
    assert result["parameters"]["engine"]["device"] == "cpu"
    assert result["model"]["file"] == "toy.gguf"


def test_rows_can_be_chosen_and_unknown_ones_are_named(plan):
    chosen = gpu.measure(replace(plan, rows=("decode_start",)), lambda *_: None)
    assert chosen.series.keys() == {"decode_tok_s_depth0"}
    with pytest.raises(SettingInvalid, match="rows nonsense: known are decode_start"):
        gpu.measure(replace(plan, rows=("nonsense",)), lambda *_: None)
    with pytest.raises(SettingInvalid, match="a small model besides"):
        gpu.measure(replace(plan, rows=("small",), small=None), lambda *_: None)


def test_a_document_that_is_not_remembered_is_no_depth(plan, monkeypatch):
    usage = SimpleNamespace(cached_tokens=0)
    asked = (SimpleNamespace(usage=usage, token_ids=[1] * 9), 1.0)
    monkeypatch.setattr(Session, "ask", lambda *args, **kwargs: asked)
    far = replace(SIZES, depth=900)
    with pytest.raises(EngineError, match="of 900 tokens only 0 were remembered"):
        gpu.measure(replace(plan, sizes=far, rows=("decode_deep",)), lambda *_: None)


def test_texts_have_the_tokens_that_are_asked_for(toy):
    client = start_engine(toy, device="cpu", dtype="float32", max_slots=1, threads=1)
    try:
        filler = Filler(client)
        for size in (1, 7, 200):
            assert len(client.tokenize(filler.text(size, seed=1))) == size
        assert filler.text(50, 1) != filler.text(50, 2)
        question = filler.question_for("Some text.", 100, seed=3)
        assert client.count_tokens(filler.prompt("Some text.", question)) == 100
    finally:
        client.close()


def test_stub_drafts_follow_the_output():
    right = StubDrafter([5, 6, 7, 8], num_prompt=2, num_drafted=3)
    assert right.propose([1, 1], 20).token_ids == (5, 6, 7)
    assert right.propose([1, 1, 5], 2).token_ids == (6, 7)
    wrong = StubDrafter([5, 6, 9], num_prompt=2, num_drafted=2, vocab_size=10)
    assert wrong.propose([1, 1, 5], 20).token_ids == (7, 0)
    right.asked_at = [(0.0, True), (1.0, True), (1.5, True), (3.5, False), (4.0, True)]
    assert right.step_times_ms() == [500.0, 2000.0]


def test_ratios_are_above_one_where_ours_is_faster():
    figures = Figures({"decode_tok_s_depth9": [10.0, 30.0, 20.0], "verify16_ms_depth0": [24.0]})
    figures.add("decode_tok_s_depth9", "tokens/s", [40.0, 60.0])
    figures.add("verify16_ms_depth0", "ms", [12.0])
    figures.add("ttft_9_s", "s", [1.0])
    assert figures.series["decode_tok_s_ratio_vs_llamacpp_depth9"].values == [2.0, 3.0]
    assert figures.series["verify16_ms_ratio_vs_llamacpp_depth0"].values == [2.0]
    assert statistics.median(figures.series["llamacpp_decode_tok_s_depth9"].values) == 20.0
    assert "ttft_9_s_ratio_vs_llamacpp" not in figures.series


LLAMA_BENCH = """#!/bin/sh
case "$*" in *"-ctk q8_0"*"-d 300"*) depth=300 ;; *"-ctk f16"*"-d 0"*) depth=0 ;; *) exit 3 ;; esac
cat <<END
[{"n_prompt": 16, "n_gen": 0, "n_depth": $depth, "samples_ts": [1000.0, 2000.0]},
 {"n_prompt": 40, "n_gen": 0, "n_depth": $depth, "samples_ts": [500.0]},
 {"n_prompt": 0, "n_gen": 8, "n_depth": $depth, "samples_ts": [80.0, 82.0]}]
END
"""


def test_a_live_llama_bench_is_asked_for_the_same_work(plan, tmp_path, monkeypatch):
    program = tmp_path / "llama-bench"
    program.write_text(LLAMA_BENCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = gpu.llama_figures(plan, gpu.ROWS, lambda *_: None)
    assert found["decode_tok_s_depth300"] == [80.0, 82.0]
    assert found["verify16_ms_depth0"] == [16.0, 8.0]
    assert found["prefill_tok_s_40_depth0"] == [500.0]
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(EngineError, match="llama-bench could not be used"):
        gpu.llama_figures(plan, gpu.ROWS, lambda *_: None)


def test_measured_figures_of_llama_cpp_are_for_that_model_on_that_card(plan, toy, monkeypatch):
    for name, expected in (("NVIDIA H200", llama_bench.MEASURED["ttft_138696_s"]), ("L4", None)):
        cards = (Card(name, 1, 0, "9.0", "580"),)
        monkeypatch.setattr(gpu, "list_cards", lambda cards=cards: cards)
        found = gpu.llama_figures(plan, gpu.ROWS, lambda *_: None)
        assert found.get("ttft_138696_s", [None])[0] == expected


def test_cards_are_read_from_the_drivers_tool(tmp_path, monkeypatch):
    from ragflash.engine import cards

    line = "NVIDIA GeForce RTX 4090, 24564, 300, 8.9, 580.1"
    run = SimpleNamespace(stdout=f"{line}\n{line}\n")
    monkeypatch.setattr(cards.shutil, "which", lambda name: name)
    monkeypatch.setattr(cards.subprocess, "run", lambda *args, **kwargs: run)
    found = cards.list_cards()
    assert len(found) == 2
    assert found[0] == Card("NVIDIA GeForce RTX 4090", 24564 << 20, 300 << 20, "8.9", "580.1")
    run.stdout = "NVIDIA-SMI has failed\n"
    assert cards.list_cards() == ()
    monkeypatch.setattr(cards.shutil, "which", lambda name: None)
    assert cards.list_cards() == ()


def test_it_runs_where_there_is_no_server_to_import(toy, tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    given = ["gpu", "--model", str(toy), "--quick", "--device", "cpu", "--kv", "auto"]
    given += ["--rows", "decode_start", "--commit", "abc", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench", *given])
    monkeypatch.setattr(gpu, "QUICK", SIZES)
    main()
    result = json.loads(out.read_text())
    assert result["command"].startswith("ragflash bench gpu --model")
    assert result["decode_tok_s_depth0"] > 0
