"""Where the time of a step goes on a card: `python -m ragflash.bench.gpu_profile --model FILE`.

Says, of decoding and of a prompt, what the clock says without a profiler, the host's share of it,
and what torch's profiler counts in the same work done again: launches, the sum of their times on
the card, and the kernels that take most.
"""

import argparse
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from ragflash.bench.gpu_session import Session, Sizes
from ragflash.bench.stub_drafter import DrafterSlot
from ragflash.engine.build import start_engine
from ragflash.engine.request import Finished
from ragflash.kvcache.planner import PREFILL_ROWS
from ragflash.models.contract import ForwardBatch
from ragflash.models.device.model import DeviceModel

_TOP_KERNELS = 12

_log = logging.getLogger("ragflash.bench")
Options = ParamSpec("Options")
Result = TypeVar("Result")
Forward = Callable[Concatenate[DeviceModel, ForwardBatch, Options], Result]


@dataclass(frozen=True, slots=True)
class Call:
    """A forward of the model, in seconds of the monotonic clock."""

    begun: float
    ended: float
    num_rows: int


@contextmanager
def noted_forwards() -> Iterator[list[Call]]:
    """Note every forward of models on a card."""
    calls: list[Call] = []

    def noting(original: Forward[Options, Result]) -> Forward[Options, Result]:
        def call(
            model: DeviceModel,
            batch: ForwardBatch,
            /,
            *args: Options.args,
            **kwargs: Options.kwargs,
        ) -> Result:
            begun = time.perf_counter()
            result = original(model, batch, *args, **kwargs)
            calls.append(Call(begun, time.perf_counter(), len(batch.token_ids)))
            return result

        return call

    originals = {name: getattr(DeviceModel, name) for name in ("forward", "forward_greedy")}
    for name, original in originals.items():
        setattr(DeviceModel, name, noting(original))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(DeviceModel, name, original)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a card ran.

    Attributes:
        launches: Kernels and copies.
        busy_ms: Their times added up.
        times_ms: The same by name.
    """

    launches: int
    busy_ms: float
    times_ms: Counter[str]

    @classmethod
    def of(cls, work: Callable[[], object]) -> "Kernels":
        """Count what some work launches, from whatever thread."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            work()
            torch.cuda.synchronize()
        times_ms: Counter[str] = Counter()
        launches = 0
        for event in profile.events() or ():
            if event.device_type.name == "CUDA":
                times_ms[event.name] += event.time_range.elapsed_us() / 1000
                launches += 1
        return cls(launches, sum(times_ms.values()), times_ms)


def tell(name: str, wall_ms: float, calls: Sequence[Call], kernels: Kernels, parts: int) -> None:
    """Say what `parts` equal pieces of work took, each."""
    between = [1000 * (after.begun - before.ended) for before, after in pairwise(calls)]
    inside = [1000 * (call.ended - call.begun) for call in calls]
    _log.info("%s: %.3f ms by the clock", name, wall_ms / parts)
    _log.info(
        "  %.1f forwards of %s … rows, medians %.3f ms inside and %.3f ms of the host between them",
        len(calls) / parts,
        ", ".join(str(call.num_rows) for call in calls[:4]),
        statistics.median(inside),
        statistics.median(between or [0.0]),
    )
    _log.info(
        "  %.0f kernels and copies, %.3f ms on the card when each is timed",
        kernels.launches / parts,
        kernels.busy_ms / parts,
    )
    for kernel, total_ms in kernels.times_ms.most_common(_TOP_KERNELS):
        _log.info("    %9.1f µs  %s", 1000 * total_ms / parts, kernel[:90])


def profile_decode(session: Session, num_tokens: int) -> None:
    """Look at plain greedy decoding."""

    def decode() -> Finished:
        return session.behind(0, "Tell stories.", num_tokens + 1)[0]

    decode()
    with noted_forwards() as calls:
        finished = decode()
    steps = len(finished.token_ids) - 1
    kernels = Kernels.of(decode)
    tell("a decoded token", finished.timings.predicted_ms, calls[-steps:], kernels, steps)


def profile_prompt(session: Session, num_tokens: int) -> None:
    """Look at the reading of a prompt up to its first token."""

    def read(seed: int) -> Finished:
        return session.behind(0, session.filler.question_for("", num_tokens, seed), 1)[0]

    read(0)
    with noted_forwards() as calls:
        finished = read(1)
    kernels = Kernels.of(lambda: read(2))
    name = f"a prompt of {finished.timings.prompt_n} tokens"
    tell(name, finished.timings.prompt_ms, calls, kernels, 1)


def main() -> None:
    """Profile a model on the card at hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--decode", type=int, default=64, help="tokens")
    parser.add_argument("--prompt", type=int, action="append", help="tokens; repeatable")
    parser.add_argument("--ctx", type=int, help="tokens")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    slot = DrafterSlot()
    client = start_engine(
        given.model,
        device="cuda",
        context_tokens=given.ctx,
        max_slots=1,
        prefill_chunk_tokens=PREFILL_ROWS,
        drafter_factory=slot,
    )
    with closing(client):
        _log.info("%s on %s", client.info().model, client.info().device)
        session = Session(client, slot, Sizes())
        profile_decode(session, given.decode)
        for num_tokens in given.prompt or (512,):
            profile_prompt(session, num_tokens)


if __name__ == "__main__":
    main()
