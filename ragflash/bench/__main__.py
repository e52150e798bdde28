"""`python -m ragflash.bench gpu`: for a card's machine that has the engine's libraries only.

The same as `ragflash bench gpu`, which imports those of the server too.
"""

import argparse
import logging
import sys
from pathlib import Path

from ragflash.bench import gpu, record
from ragflash.bench.provenance import provenance

_log = logging.getLogger("ragflash.bench")
_GIB = 1 << 30


def main() -> None:
    """Measure, and write the result after every row."""
    parser = argparse.ArgumentParser(prog="ragflash bench", description=__doc__)
    parser.add_argument("name", choices=["gpu"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--small", type=Path)
    parser.add_argument("--rows", action="append", default=[], help="repeatable")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--vram", type=float, help="GiB")
    parser.add_argument("--kv", default="tq3_0")
    parser.add_argument("--commit", default="", help="of the files, where they are no checkout")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    begun = provenance() | {"command": " ".join(["ragflash", "bench", *sys.argv[1:]])}
    begun["commit"] = begun["commit"] or given.commit
    plan = gpu.Plan(
        given.model,
        small=given.small,
        rows=given.rows,
        device=given.device,
        vram_bytes=None if given.vram is None else int(given.vram * _GIB),
        kv_format=given.kv,
        sizes=gpu.QUICK if given.quick else gpu.FULL,
    )

    def keep(measurement: record.Measurement) -> None:
        result = record.build("gpu", begun, measurement)
        record.write(given.out, result)
        _log.info("%s", {name: one["median"] for name, one in result["summary"].items()})

    gpu.measure(plan, lambda *told: _log.info("%s %s of %s", *told), keep)


if __name__ == "__main__":
    main()
