"""Several outputs of one prompt, which is read once.

The first request keeps all of the prompt but its last token; the others begin when that is done,
and compute the one token that is left.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from ragflash.engine.request import (
    DraftCount,
    Event,
    Finished,
    GenerateRequest,
    PrefillProgress,
    Timings,
    Usage,
)

MAX_CHOICES = 8


class Generator(Protocol):
    """What a client of the engine offers."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yield a request's events, a terminal one last."""


async def generate_choices(
    engine: Generator, request: GenerateRequest, n: int
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of `n` outputs, each with the number of its output.

    The first is that of `request` itself; the seeds of the others derive from its seed. Closing the
    iterator cancels all. Raises what `engine.generate` raises.
    """
    if n == 1:
        async with aclosing(engine.generate(request)) as only:
            async for event in only:
                yield 0, event
        return
    events: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue()
    is_read = asyncio.Event()

    async def play(number: int) -> None:
        if number:
            await is_read.wait()
        try:
            async with aclosing(engine.generate(_numbered(request, number))) as own:
                async for event in own:
                    if _has_read(event):
                        is_read.set()
                    events.put_nowait((number, event))
        finally:
            is_read.set()
            events.put_nowait((number, None))

    tasks = [asyncio.create_task(play(number)) for number in range(n)]
    try:
        for _ in range(n):
            while (found := await events.get())[1] is not None:
                yield found[0], found[1]
            await tasks[found[0]]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def total_usage(finished: Sequence[Finished]) -> Usage:
    """Count the prompt once and all outputs, the first of `finished` being the first output."""
    first = finished[0].usage
    completion_tokens = sum(each.usage.completion_tokens for each in finished)
    return replace(first, completion_tokens=completion_tokens)


def total_timings(finished: Sequence[Finished]) -> Timings:
    """Give the prompt's times of the first output and the work of all."""
    all_timings = [each.timings for each in finished]
    return replace(
        all_timings[0],
        predicted_n=sum(each.predicted_n for each in all_timings),
        predicted_ms=max(each.predicted_ms for each in all_timings),
        draft_n=sum(each.draft_n for each in all_timings),
        draft_n_accepted=sum(each.draft_n_accepted for each in all_timings),
        forward_rows=sum(each.forward_rows for each in all_timings),
        drafts=_total_drafts(all_timings),
        idle_steps=_total_idle(all_timings),
    )


def _total_drafts(all_timings: Sequence[Timings]) -> tuple[DraftCount, ...]:
    drafted, accepted = Counter[str](), Counter[str]()
    for each in all_timings:
        for count in each.drafts:
            drafted[count.source] += count.drafted
            accepted[count.source] += count.accepted
    return tuple(DraftCount(source, n, accepted[source]) for source, n in drafted.items())


def _total_idle(all_timings: Sequence[Timings]) -> tuple[tuple[str, int], ...]:
    idle = Counter[str]()
    for each in all_timings:
        idle.update(dict(each.idle_steps))
    return tuple(idle.items())


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of an output: the given one for the first, unrelated ones for the others."""
    if number == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _numbered(request: GenerateRequest, number: int) -> GenerateRequest:
    seed = request.sampling.seed
    if seed is not None:
        seed = derived_seed(seed, number)
    sampling = replace(request.sampling, seed=seed)
    return replace(request, id=f"{request.id}-{number}", sampling=sampling, keep_prompt=True)


def _has_read(event: Event) -> bool:
    return not isinstance(event, PrefillProgress) or event.done == event.total
