"""`bench quotes` writes quotes of real documents."""

from ragflash.bench import quotes


def test_quotes_of_a_document_are_timed(packaged_model_path, sample_dir):
    measurement = quotes.measure(
        [sample_dir / "bug-reporting.txt"],
        packaged_model_path,
        quotes.Sizes(source_tokens=3000, quotes=5, runs=2),
        lambda *_: None,
    )
    assert set(measurement.series) == {
        *("first_prompt_ms", "same_prompt_ms", "first_mask_ms"),
        *("mask_median_ms", "mask_p99_ms", "mask_most_ms"),
    }
    assert all(len(series.values) == 2 for series in measurement.series.values())
    assert measurement.parameters["source_tokens"] == 3000
