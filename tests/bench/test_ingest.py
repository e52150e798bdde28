"""`bench ingest` measures what it says it measures."""

import pytest

from ragflash.bench import ingest
from ragflash.bench.record import summarise
from ragflash.errors import DocumentUnreadable
from tests.rag.conftest import HashEmbedder


def test_a_document_is_parsed_embedded_and_read_in(tmp_path):
    path = tmp_path / "law.txt"
    path.write_text("Records are kept for seven years. They are then destroyed by the keeper.")
    told = []
    measurement = ingest.measure(
        path, HashEmbedder(), tmp_path / "library", 2, lambda *progress: told.append(progress)
    )
    summary = summarise(measurement.series)
    assert summary["parse_pages_per_s"]["n"] == 2
    assert summary["stored_bytes"]["median"] > path.stat().st_size
    assert all(figures["min"] > 0 for figures in summary.values())
    assert measurement.parameters["pages"] == 1
    assert measurement.embedder == HashEmbedder().fingerprint
    assert ("parsing", 2, 2) in told


def test_a_file_without_text_is_refused_in_words(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(DocumentUnreadable, match=r"empty\.txt"):
        ingest.measure(path, HashEmbedder(), tmp_path / "library", 1, lambda *_: None)
