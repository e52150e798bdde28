"""Committed figures say where they come from, and their sums follow from their rows."""

import json
from pathlib import Path

import pytest

from ragflash.bench.record import read_series, summarise

RESULTS = Path(__file__).parents[2] / "docs" / "results"
EVALS = sorted(path.name for path in RESULTS.glob("eval*.json"))
QUESTIONS = {"samples": 30, "languages": 41}  # by folder
BENCHES = [
    path for path in sorted(RESULTS.glob("*.json")) if "bench" in json.loads(path.read_text())
]


def share(part: float, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_a_result_says_where_it_comes_from(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["command"].startswith("ragflash ")
    assert result["commit"]
    assert not result["commit"].endswith("+"), "measured with changes that no commit holds"
    assert {"cpu", "cores", "memory_bytes"} <= result["hardware"].keys()


def figures(rows: list[dict]) -> dict:
    answerable = [row for row in rows if row["answerable"]]
    others = [row for row in rows if not row["answerable"]]
    sent = sum(len(row["citations"]) for row in rows)
    own = sum(len(row["citations"]) for row in answerable)
    return {
        "quote_located_rate": share(sum(row["located"] for row in rows), sent),
        "citation_page_recall": share(
            sum(row["page_hits"] > 0 for row in answerable), len(answerable)
        ),
        "citation_page_precision": share(sum(row["page_hits"] for row in answerable), own),
        "expected_quote_overlap": pytest.approx(
            share(sum(row["overlap"] for row in answerable), len(answerable)), abs=1e-4
        ),
        "abstention_recall": share(sum(not row["answered"] for row in others), len(others)),
        "false_refusal_rate": share(
            sum(not row["answered"] for row in answerable), len(answerable)
        ),
    }


@pytest.mark.parametrize("name", EVALS)
def test_figures_follow_from_the_rows(name):
    result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    rows = result["rows"]
    assert result["metrics"] == figures(rows)
    assert len(rows) == QUESTIONS[result["folder"]]
    for language, found in result.get("languages", {}).items():
        assert found == figures([row for row in rows if row["language"] == language])


def test_the_model_of_a_result_is_named():
    result = json.loads((RESULTS / "eval.json").read_text(encoding="utf-8"))
    assert len(result["engine"]["model_hash"]) == 64


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.name)
def test_a_benchmark_follows_from_its_samples(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["summary"] == summarise(read_series(result))
    assert result["bench"] == path.stem.partition("_")[0]  # `gpu_small`: another call of `gpu`
    assert result["command"].startswith(f"ragflash bench {result['bench']}")
    assert {"date", "python", "torch", "load_1m", "load_1m_after"} <= result.keys()
    assert result["threads"] > 0
    assert result["model"] is None or len(result["model"]["sha256"]) == 64
    assert "embedder" in result
