"""`python -m ragflash.bench`: for a card's machine that has the engine's libraries only.

`gpu` does what `ragflash bench gpu` does and `kv` what `ragflash model check` does; these import
the libraries of the server too. `sessions` is `ragflash bench sessions` for a card, with a document
as long as a context and fewer restarts; it needs xxhash and sqlite-utils besides. `drafting` is
`ragflash bench drafting`.
"""

import argparse
import logging
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ragflash.bench import draft_steps, drafting, gpu, kv_quality, record
from ragflash.bench.draft_tasks import TASKS
from ragflash.bench.gpu_session import ROOM_TOKENS
from ragflash.bench.provenance import provenance
from ragflash.engine.build import start_engine
from ragflash.engine.client import EngineClient
from ragflash.kvcache.allocator import PAGE_TOKENS, pages_for
from ragflash.kvcache.archive import SegmentArchive

if TYPE_CHECKING:
    from ragflash.bench.sessions import Running

_log = logging.getLogger("ragflash.bench")
_GIB = 1 << 30
_COMMANDS = {
    "gpu": "bench gpu",
    "kv": "model check",
    "sessions": "bench sessions",
    "drafting": "bench drafting",
}


def main() -> None:
    """Measure, and write the result; of `gpu` and `drafting` after every row."""
    parser = argparse.ArgumentParser(prog="python -m ragflash.bench", description=__doc__)
    parser.add_argument("name", choices=[*_COMMANDS])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--small", type=Path)
    parser.add_argument("--rows", action="append", default=[], help="repeatable")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--vram", type=float, help="GiB")
    parser.add_argument("--kv", default="tq3_0")
    parser.add_argument("--ctx", type=int, action="append", help="of `kv`, `drafting`; repeatable")
    parser.add_argument("--text", type=Path, help="prose, of `kv` and `drafting`")
    parser.add_argument("--tokens", type=int, default=138_696, help="of `sessions`: a document's")
    parser.add_argument("--short", type=int, default=4096, help="of `sessions`: short documents'")
    parser.add_argument("--restarts", type=int, default=2, help="of `sessions`: warm, and cold")
    _add_drafting(parser)
    parser.add_argument("--folder", type=Path, help="of `sessions`: on the disk that is meant")
    parser.add_argument("--commit", default="", help="of the files, where they are a copy")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    command = " ".join(["ragflash", _COMMANDS[given.name], *sys.argv[2:]])
    begun = provenance() | {"command": command}
    begun["commit"] = given.commit or begun["commit"]
    run = {"gpu": _time, "kv": _check, "sessions": _restart, "drafting": _draft}[given.name]
    run(given, begun)


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    """Add what `drafting` alone knows."""
    add = parser.add_argument_group("drafting").add_argument
    add("--task", action="append", choices=[*TASKS, drafting.NO_TASK], help="repeatable")
    add("--output-tokens", type=int, help="of every answer")
    add("--rounds", type=int, help="answers of each kind, 7 or more")
    add("--peer", action="store_true", help="llama.cpp's lookups beside, if it is installed")
    add("--large", type=Path, help="a large model, for its steps")
    add("--large-drafter", type=Path, help="its DFlash drafter")
    add("--depth", type=int, action="append", help="of `--large`; repeatable")
    add("--beside", type=Path, help="result of another device")
    add("--resume", action="store_true", help="go on with the rows that --out lacks")


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


def _restart(given: argparse.Namespace, begun: dict[str, object]) -> None:
    from ragflash.bench import sessions  # noqa: PLC0415  (imports xxhash and sqlite-utils)

    sizes = sessions.Sizes(
        document_tokens=given.tokens, short_tokens=given.short, restarts=given.restarts
    )
    context_tokens = pages_for(given.tokens + ROOM_TOKENS) * PAGE_TOKENS
    begun["command"] = (  # what is left out here is not left out there
        f"ragflash bench sessions --model {given.model.name} --device {given.device} "
        f"--kv {given.kv} --ctx {context_tokens} --slots 1 --tokens {given.tokens} "
        f"--short {given.short} --restarts {given.restarts}"
        + (f" --vram {given.vram:g}" if given.vram else "")
    )

    with tempfile.TemporaryDirectory(prefix="ragflash-bench-", dir=given.folder) as folder:
        path = Path(folder) / "sessions"

        def load(archive: SegmentArchive) -> EngineClient:
            return start_engine(
                given.model,
                device=given.device,
                vram_bytes=_vram_bytes(given),
                context_tokens=context_tokens,
                kv_format=given.kv,
                max_slots=1,
                cache_dir=Path(folder),
                archive=archive,
            )

        def start() -> "AbstractContextManager[Running]":
            return sessions.run_over(path, load)

        result = record.build("sessions", begun, sessions.measure(start, path, sizes, _tell))
    record.write(given.out, result)
    for name, one in result["summary"].items():
        _log.info("%s %s", name, {key: one[key] for key in ("median", "min", "max")})


def _draft(given: argparse.Namespace, begun: dict[str, object]) -> None:
    large = None
    if given.large is not None:
        large = draft_steps.Plan(
            model=given.large,
            drafter=given.large_drafter,
            device=given.device,
            vram_bytes=_vram_bytes(given),
            kv_format=given.kv,
            depths=given.depth or draft_steps.DEPTHS,
        )
    plan = drafting.plan_of(
        given.text.read_text(encoding="utf-8"),
        quick=given.quick,
        tasks=given.task or (),
        contexts=given.ctx or (),
        output_tokens=given.output_tokens,
        rounds=given.rounds,
        large=large,
        peer_model=given.model if given.peer else None,
    )

    def keep(measurement: record.Measurement) -> None:
        record.write(given.out, record.build("drafting", begun, measurement))

    measurement = drafting.measure(
        plan,
        lambda: start_engine(given.model, device=given.device, max_slots=1, drafts=True),
        _tell,
        keep,
        begun=begun,
        earlier=drafting.read(given.out) if given.resume else None,
        beside=drafting.read(given.beside) if given.beside else None,
    )
    keep(measurement)
    for name, one in record.summarise(measurement.series).items():
        _log.info("%s %s", name, {key: one[key] for key in ("median", "ratio") if key in one})


def _vram_bytes(given: argparse.Namespace) -> int | None:
    return None if given.vram is None else int(given.vram * _GIB)


def _tell(*told: object) -> None:
    _log.info("%s %s of %s", *told)


if __name__ == "__main__":
    main()
