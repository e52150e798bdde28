"""What a benchmark measured: raw samples, the summary that follows from them, and the result file.

A summary is computed by `summarise` and by nothing else, so that a reader, or a test, can compute
it again from the samples in the file. Ratios come from interleaved pairs: two things measured
alternately in one process see the same disturbances.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ragflash.errors import StorageError

LEAST_PAIRS = 7
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Series:
    """Readings of one figure, in the order in which they were taken.

    Attributes:
        unit: For example "pages/s" or "ms".
        values: Finite numbers, at least one.
        against: Name of the series whose readings these alternate with, one by one; the summary
            then holds the ratios to it.
    """

    unit: str
    values: Sequence[float]
    against: str | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a benchmark's `measure` returns.

    Attributes:
        series: By name.
        parameters: What was measured, such as sizes and file names, as JSON values.
        model: File name and SHA-256 of the model file; `None` if none took part.
        embedder: Fingerprint of the embedding model; `None` if none took part.
        threads: That computations may use.
        is_flat: Whether the medians stand in the result by their names besides.
        missing: Rows that a whole result has and this one lacks; `None` if it is always whole.
    """

    series: Mapping[str, Series]
    threads: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, str] | None = None
    embedder: str | None = None
    is_flat: bool = False
    missing: Sequence[str] | None = None


def paired(
    measured: Callable[[], float], baseline: Callable[[], float], pairs: int = LEAST_PAIRS
) -> tuple[list[float], list[float]]:
    """Take readings of two things alternately, each going first every other time.

    Raises:
        ValueError: Fewer than `LEAST_PAIRS` pairs say nothing about a ratio.
    """
    if pairs < LEAST_PAIRS:
        raise ValueError(f"a ratio takes {LEAST_PAIRS} pairs or more, not {pairs}")
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(pairs):
        if turn % 2:
            theirs.append(baseline())
            ours.append(measured())
        else:
            ours.append(measured())
            theirs.append(baseline())
    return ours, theirs


def summarise(series: Mapping[str, Series]) -> dict[str, dict[str, Any]]:
    """Sum readings up: number, median, least, largest and 90th percentile (nearest rank).

    A series that alternates with another also has `ratio`: the median of the ratios, pair by
    pair, and the 95 % interval for it that order statistics give without assuming anything about
    their distribution (David and Nagaraja, "Order Statistics", 2003, section 7.1).

    Raises:
        ValueError: No readings, a reading that is no finite number, or halves of pairs.
    """
    return {name: _sum_up(name, one, series) for name, one in series.items()}


def _sum_up(name: str, one: Series, series: Mapping[str, Series]) -> dict[str, Any]:
    if not one.values or not all(math.isfinite(value) for value in one.values):
        raise ValueError(f"{name} needs finite readings")
    ordered = sorted(one.values)
    summary: dict[str, Any] = {
        "unit": one.unit,
        "n": len(ordered),
        "median": _round(statistics.median(ordered)),
        "min": _round(ordered[0]),
        "max": _round(ordered[-1]),
        "p90": _round(ordered[math.ceil(0.9 * len(ordered)) - 1]),
    }
    if one.against is not None:
        other = series.get(one.against)
        if other is None or len(other.values) != len(ordered) or len(ordered) < LEAST_PAIRS:
            raise ValueError(f"{name} and {one.against} are not {LEAST_PAIRS} pairs or more")
        ratios = [ours / theirs for ours, theirs in zip(one.values, other.values, strict=True)]
        low, high = median_interval(ratios)
        summary["ratio"] = {
            "to": one.against,
            "median": _round(statistics.median(ratios)),
            "low": _round(low),
            "high": _round(high),
        }
    return summary


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics between which the median lies with 95 % confidence, given six readings.

    The number of readings below the median is binomial (n, 1/2), whatever their distribution.
    """
    ordered, count = sorted(values), len(values)
    cut, outside = 0, 2 / 2**count
    while cut + 1 < count - cut - 1:
        outside += 2 * math.comb(count, cut + 1) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    return ordered[cut], ordered[count - 1 - cut]


def build(name: str, begun: Mapping[str, Any], measurement: Measurement) -> dict[str, Any]:
    """Put a result together.

    Args:
        name: Of the benchmark.
        begun: `provenance()`, taken before it began.
        measurement: What it measured.
    """
    summary = summarise(measurement.series)
    medians = {key: figures["median"] for key, figures in summary.items()}
    missing = measurement.missing
    return {
        "bench": name,
        **({} if missing is None else {"complete": not missing, "missing": list(missing)}),
        **(medians if measurement.is_flat else {}),
        **begun,
        "threads": measurement.threads,
        "load_1m_after": round(os.getloadavg()[0], 2),
        "model": measurement.model,
        "embedder": measurement.embedder,
        "parameters": dict(measurement.parameters),
        "summary": summary,
        "samples": {name: asdict(one) for name, one in measurement.series.items()},
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file, whole or not at all.

    Raises:
        StorageError: The disk refused.
    """
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, ensure_ascii=False, indent=1) + "\n"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error


def read_series(result: Mapping[str, Any]) -> dict[str, Series]:
    """Read the samples of a result back, as `summarise` takes them."""
    return {name: Series(**fields) for name, fields in result["samples"].items()}


def _round(value: float) -> float:
    """Six significant digits: no reading is better, and the file stays readable."""
    return float(f"{value:.6g}")
