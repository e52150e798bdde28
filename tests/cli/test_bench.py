"""`ragflash bench`: figures for people, a result file for the record."""

import json

import pytest

from ragflash.bench.record import Measurement, Series, read_series, summarise
from ragflash.errors import EngineDead


@pytest.fixture
def measured(monkeypatch):
    def measure(path, embedder, folder, runs, progress):
        progress("parsing", runs, runs)
        return Measurement({"pages_per_s": Series("pages/s", [float(runs), 4.0])}, threads=2)

    monkeypatch.setattr("ragflash.bench.ingest.measure", measure)


@pytest.mark.usefixtures("measured")
def test_the_summary_is_shown_and_the_result_kept(run, tmp_path, law):
    result = run("bench", "ingest", law, "--runs", 2, "--out", tmp_path / "sub" / "r.json")
    assert result.exit_code == 0, result.output
    assert "pages_per_s" in result.stdout
    kept = json.loads((tmp_path / "sub" / "r.json").read_text())
    assert kept["bench"] == "ingest"
    assert kept["summary"] == summarise(read_series(kept))
    assert kept["summary"]["pages_per_s"]["median"] == 3.0
    assert kept["threads"] == 2


@pytest.mark.usefixtures("measured")
def test_json_is_the_result(run_json, law):
    result = run_json("bench", "ingest", law)
    assert result["summary"]["pages_per_s"]["max"] == 10.0
    assert {"command", "date", "commit", "hardware", "torch", "load_1m"} <= result.keys()


def test_a_file_that_is_not_there_is_named(run, tmp_path):
    result = run("bench", "ingest", tmp_path / "none.pdf")
    assert result.exit_code == 3
    assert "none.pdf" in result.stderr


def test_what_a_long_benchmark_has_is_kept_before_it_ends(run, tmp_path, monkeypatch):
    def measure(plan, progress, keep):
        assert plan.rows == ["decode_start"]
        assert (plan.device, plan.vram_bytes, plan.kv_format) == ("cpu", 24 << 30, "q8_0")
        keep(Measurement({"decode_tok_s_depth0": Series("tokens/s", [1.0])}, 1, is_flat=True))
        raise EngineDead("the card is gone")

    monkeypatch.setattr("ragflash.bench.gpu.measure", measure)
    out = tmp_path / "gpu.json"
    given = ("--rows", "decode_start", "--device", "cpu", "--vram", "24", "--kv", "q8_0")
    result = run("bench", "gpu", *given, "--out", out)
    assert result.exit_code == 1
    assert json.loads(out.read_text())["decode_tok_s_depth0"] == 1.0
