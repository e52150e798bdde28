"""A summary follows from the samples, and ratios from interleaved pairs."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash.bench.record import (
    Measurement,
    Series,
    build,
    median_interval,
    paired,
    read_series,
    summarise,
    write,
)
from ragflash.errors import StorageError

readings = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60)


def test_a_summary_of_readings():
    summary = summarise({"a": Series("ms", [5.0, 1.0, 2.0, 4.0, 3.0, 9.0, 8.0, 7.0, 6.0, 10.0])})
    expected = {"unit": "ms", "n": 10, "median": 5.5, "min": 1.0, "max": 10.0, "p90": 9.0}
    assert summary == {"a": expected}


@given(readings)
def test_figures_are_in_order(values):
    figures = summarise({"a": Series("s", values)})["a"]
    assert figures["min"] <= figures["median"] <= figures["max"]
    assert figures["min"] <= figures["p90"] <= figures["max"]


def test_ratios_are_taken_pair_by_pair():
    theirs = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    ours = [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 192.0]
    series = {"ours": Series("s", ours, against="theirs"), "theirs": Series("s", theirs)}
    summary = summarise(series)
    assert summary["ours"]["ratio"] == {"to": "theirs", "median": 2.0, "low": 2.0, "high": 3.0}
    assert "ratio" not in summary["theirs"]


@pytest.mark.parametrize(("count", "low", "high"), [(7, 0, 6), (9, 1, 7), (15, 3, 11), (25, 7, 17)])
def test_the_interval_is_that_of_the_sign_test(count, low, high):
    assert median_interval([float(value) for value in range(count)]) == (low, high)


@given(st.integers(6, 60))
def test_the_interval_is_the_narrowest_that_is_sure_enough(count):
    low, high = median_interval(list(range(count)))
    assert low == count - 1 - high

    def missed(cut):
        return 2 * sum(math.comb(count, below) for below in range(cut + 1)) / 2**count

    assert missed(low) <= 0.05 < missed(low + 1)


@pytest.mark.parametrize(
    "series",
    [
        {"a": Series("s", [])},
        {"a": Series("s", [1.0, math.nan])},
        {"a": Series("s", [1.0] * 7, against="b")},
        {"a": Series("s", [1.0] * 7, against="b"), "b": Series("s", [1.0] * 8)},
        {"a": Series("s", [1.0] * 6, against="b"), "b": Series("s", [1.0] * 6)},
    ],
)
def test_readings_that_say_nothing_are_refused(series):
    with pytest.raises(ValueError, match="a "):
        summarise(series)


def test_pairs_alternate_and_each_goes_first():
    order = []

    def take(name):
        order.append(name)
        return float(len(order))

    ours, theirs = paired(lambda: take("a"), lambda: take("b"), 8)
    assert "".join(order) == "abba" * 4
    assert (len(ours), len(theirs)) == (8, 8)


def test_fewer_than_seven_pairs_are_refused():
    with pytest.raises(ValueError, match="7 pairs"):
        paired(lambda: 1.0, lambda: 1.0, 6)


@given(readings)
def test_a_result_gives_its_series_back(values):
    measurement = Measurement({"a": Series("s", values)}, threads=1)
    result = build("test", {"command": "ragflash bench test"}, measurement)
    assert summarise(read_series(result)) == result["summary"]
    assert result["summary"]["a"]["median"] == pytest.approx(statistics.median(values), rel=1e-5)


def test_a_result_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"result\.json cannot be written"):
        write(tmp_path / "file" / "result.json", {})
