"""Time the kernels on the card at hand: `python kernels/bench/run.py --op qmatmul`.

Every figure is the median of graph replays over copies of the data that do not fit the cache,
checked against float64 first. Shares are of the bytes a second that negating a large buffer
into another reads and writes, measured in the same run.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

CACHE_BYTES = 2**28  # what the copies of the data take at least


def time_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Return the median time of a call in a graph that makes all of them, in µs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (*calls, *calls):
            call()
    samples = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 500 / len(calls))
    return statistics.median(samples[1:])


def measure_ceiling() -> float:
    """Return the bytes a second that a large buffer is read and another one written with."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / time_us([lambda: torch.neg(source, out=target)]) * 1e6


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖ in float64; NaN if there is one."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


class Report:
    """Lines on standard output, and the same as records."""

    def __init__(self, ceiling: float) -> None:
        self.ceiling = ceiling
        self.records: list[dict[str, object]] = []

    def line(self, name: str, us: float, num_bytes: int, error: float, **options: object) -> None:
        """Add one measurement."""
        share = num_bytes / us * 1e6 / self.ceiling
        self.records.append(
            {"name": name, "us": us, "bytes": num_bytes, "share": share, "error": error, **options}
        )
        text = " ".join(f"{key}={value}" for key, value in options.items())
        sys.stdout.write(f"{name:34s} {us:8.2f} us {share:6.1%}  error {error:.0e}  {text}\n")
        sys.stdout.flush()


def main() -> None:
    """Run the operations named on the command line."""
    from attention_bench import bench_attention_parts, bench_codec  # noqa: PLC0415 - beside it
    from delta_bench import bench_gated_delta  # noqa: PLC0415
    from prefill_bench import bench_prefill_attention  # noqa: PLC0415
    from qmatmul_bench import bench_qmatmul, bench_unpack  # noqa: PLC0415
    from rows_bench import bench_rows  # noqa: PLC0415
    from tq3_bench import bench_tq3  # noqa: PLC0415

    operations = {
        "qmatmul": bench_qmatmul,
        "unpack": bench_unpack,
        "rows": bench_rows,
        "attention_parts": bench_attention_parts,
        "attention_tq3": bench_tq3,
        "kv_codec": bench_codec,
        "gated_delta": bench_gated_delta,
        "prefill_attention": bench_prefill_attention,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=operations, action="append", required=True)
    parser.add_argument("--sweep", action="store_true", help="try the launch options too")
    parser.add_argument("--out", type=Path, help="write the records here, as JSON")
    arguments = parser.parse_args()
    report = Report(measure_ceiling())
    sys.stdout.write(f"{torch.cuda.get_device_name()}: {report.ceiling / 1e9:.0f} GB/s\n")
    for name in arguments.op:
        operations[name](report, sweep=arguments.sweep)
    if arguments.out:
        arguments.out.write_text(json.dumps(report.records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
