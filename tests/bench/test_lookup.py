"""`bench lookup` drafts texts of every kind from an index of real documents."""

from ragflash.bench import lookup
from ragflash.bench.record import summarise
from ragflash.gguf.packaged import packaged_model_path
from ragflash.samples import sample_path

SIZES = lookup.Sizes(source_tokens=3000, text_tokens=300, runs=2)


def measure(documents):
    told = []
    model = packaged_model_path()
    measurement = lookup.measure(
        documents,
        sample_path("sqlite-wal.html"),
        model,
        SIZES,
        lambda *progress: told.append(progress),
    )
    return measurement, told


def test_what_copies_is_foreseen_and_what_does_not_is_not():
    measurement, told = measure([sample_path("bug-reporting.txt")])
    summary = summarise(measurement.series)
    assert summary["build_s"]["n"] == summary["load_s"]["n"] == 2
    assert summary["bytes_per_token"]["max"] <= 18.5
    assert summary["quote_tokens_per_step"]["min"] > 1.5
    assert summary["edit_tokens_per_step"]["min"] > 1.5
    assert 1 <= summary["free_tokens_per_step"]["max"] < 1.5
    kinds = [len(series.values) for name, series in measurement.series.items() if "propose" in name]
    assert all(kinds)
    assert measurement.parameters["distinct_tokens"] == 3000
    assert ("drafting edit", 1, 2) in told


def test_a_short_document_is_repeated(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("The buffer holds nine pages, and the index holds the rest of them.\n" * 3)
    measurement, _ = measure([path])
    assert measurement.parameters["source_tokens"] == 3000
    assert measurement.parameters["distinct_tokens"] < 100
