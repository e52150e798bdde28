"""`bench search` fills, searches, opens and deletes in a real library."""

from ragflash.bench import search
from ragflash.bench.record import summarise


def test_a_synthetic_library_is_searched_and_deleted_from(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "CHUNKS_PER_DOCUMENT", 4)
    monkeypatch.setattr(search, "_WORDS", 300)
    told = []
    measurement = search.measure(tmp_path, 10, 3, lambda *progress: told.append(progress))
    summary = summarise(measurement.series)
    assert summary["search_ms"]["n"] == summary["search_one_percent_ms"]["n"] == 3
    assert summary["store_chunks_per_s"]["n"] == 10
    assert all(figures["min"] > 0 for figures in summary.values())
    assert measurement.parameters["chunks"] == 40
    assert ("searching everywhere", 3, 3) in told


def test_passages_and_questions_share_terms_and_vectors(monkeypatch):
    monkeypatch.setattr(search, "_WORDS", 300)
    world = search._World.make()
    ((text, weights),) = world.passages(1)
    question = world.question()
    assert len(text.split()) == search._CHUNK_WORDS
    assert len(weights) > 20
    assert world.encode_query(question) is world.vectors[question]
