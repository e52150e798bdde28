"""How a benchmark is run from the command line: progress, summary, result file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from ragflash.bench import record
from ragflash.bench.provenance import provenance
from ragflash.cli.output import Output, Tracker

__all__ = ["run_bench", "run_kept"]


def run_bench(
    name: str,
    measure: Callable[[Tracker], record.Measurement],
    *,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run a benchmark, show its summary, and keep its result."""
    run_kept(name, lambda track, _: measure(track), out=out, as_json=as_json)


def run_kept(
    name: str,
    measure: Callable[[Tracker, Callable[[record.Measurement], None]], record.Measurement],
    *,
    out: Path | None,
    as_json: bool,
    commit: str = "",
) -> None:
    """Run a benchmark that hands over what it has before it ends, in case it never does."""
    with Output(as_json=as_json) as output:
        begun = provenance()
        begun["commit"] = commit or begun["commit"]

        def keep(measurement: record.Measurement) -> None:
            if out is not None:
                record.write(out, record.build(name, begun, measurement))

        with output.progress() as track:
            measurement = measure(track, keep)
        keep(measurement)
        result = record.build(name, begun, measurement)
        output.show(_table(result["summary"]))
        output.result(result)
        if out is not None:
            output.say(f"\nwritten to {out}")


def _table(summary: dict[str, dict[str, Any]]) -> Table:
    table = Table("figure", "unit", "n", "median", "p90", "min", "max", "ratio", box=None)
    for name, figures in summary.items():
        numbers = [f"{figures[key]:.4g}" for key in ("median", "p90", "min", "max")]
        table.add_row(name, figures["unit"], str(figures["n"]), *numbers, _ratio(figures))
    return table


def _ratio(figures: dict[str, Any]) -> str:
    if "ratio" not in figures:
        return ""
    ratio = figures["ratio"]
    return f"{ratio['median']:.3g} ({ratio['low']:.3g}–{ratio['high']:.3g}) × {ratio['to']}"
