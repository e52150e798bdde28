"""`python -m ragflash.bench`: for a card's machine that has the engine's libraries only.

`gpu` does what `ragflash bench gpu` does and `kv` what `ragflash model check` does; these import
the libraries of the server too.
"""

import argparse
import logging
import sys
from pathlib import Path

from ragflash.bench import gpu, kv_quality, record
from ragflash.bench.provenance import provenance

_log = logging.getLogger("ragflash.bench")
_GIB = 1 << 30
_COMMANDS = {"gpu": "bench gpu", "kv": "model check"}


def main() -> None:
    """Measure, and write the result; of `gpu` after every row."""
    parser = argparse.ArgumentParser(prog="python -m ragflash.bench", description=__doc__)
    parser.add_argument("name", choices=[*_COMMANDS])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--small", type=Path)
    parser.add_argument("--rows", action="append", default=[], help="repeatable")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--vram", type=float, help="GiB")
    parser.add_argument("--kv", default="tq3_0")
    parser.add_argument("--ctx", type=int, action="append", help="of `kv`; repeatable")
    parser.add_argument("--text", type=Path, help="of `kv`: prose")
    parser.add_argument("--commit", default="", help="of the files, where they are a copy")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    command = " ".join(["ragflash", _COMMANDS[given.name], *sys.argv[2:]])
    begun = provenance() | {"command": command}
    begun["commit"] = given.commit or begun["commit"]
    if given.name == "gpu":
        _time(given, begun)
    else:
        _check(given, begun)


def _time(given: argparse.Namespace, begun: dict[str, object]) -> None:
    plan = gpu.Plan(
        given.model,
        small=given.small,
        rows=given.rows,
        device=given.device,
        vram_bytes=_vram_bytes(given),
        kv_format=given.kv,
        sizes=gpu.QUICK if given.quick else gpu.FULL,
    )

    def keep(measurement: record.Measurement) -> None:
        result = record.build("gpu", begun, measurement)
        record.write(given.out, result)
        _log.info("%s", {name: one["median"] for name, one in result["summary"].items()})

    gpu.measure(plan, _tell, keep)


def _check(given: argparse.Namespace, begun: dict[str, object]) -> None:
    sizes = kv_quality.Sizes(contexts=tuple(given.ctx or kv_quality.Sizes().contexts))
    found = kv_quality.check(
        given.model,
        given.text.read_text(encoding="utf-8"),
        device=given.device,
        vram_bytes=_vram_bytes(given),
        sizes=sizes,
        progress=_tell,
    )
    record.write(given.out, {**begun, **found})
    for row in found["rows"]:
        _log.info("%s", row)


def _vram_bytes(given: argparse.Namespace) -> int | None:
    return None if given.vram is None else int(given.vram * _GIB)


def _tell(*told: object) -> None:
    _log.info("%s %s of %s", *told)


if __name__ == "__main__":
    main()
