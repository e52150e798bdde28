"""Requests that start, stop and are cancelled at random leave no page and no memory behind."""

import asyncio
import random
from contextlib import aclosing, closing

import pytest
import torch

from ragflash.bench.filler import Filler
from ragflash.engine.build import start_engine
from ragflash.engine.request import (
    ChatMessage,
    Delta,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)

SLOTS = 4
AT_ONCE = 8


@pytest.fixture(scope="module")
def client(smollm2_path, device, is_small):
    client = start_engine(
        smollm2_path,
        device=device,
        context_tokens=2048 if is_small else 16_384,
        kv_format="q8_0",
        max_slots=SLOTS,
        queue_size=64,
    )
    with closing(client):
        yield client


def request_of(filler: Filler, source: random.Random, number: int, longest: int) -> GenerateRequest:
    segments = [TextSegment(SegmentKind.QUESTION, filler.text(source.randint(1, 40), number))]
    if source.random() < 0.5:
        which = source.randrange(6)
        text = filler.text(20 + which * longest // 6, seed=which)
        name = f"document-{which}"
        span = Span(name, 0, 0, len(text))
        segments.insert(0, TextSegment(SegmentKind.DOCUMENT, text, (span,)))
    return GenerateRequest(
        f"request-{number}",
        (ChatMessage("user", tuple(segments)),),
        max_tokens=source.randint(1, 12),
        cache=source.random() < 0.7,
    )


async def serve_all(client, requests, cancel_after) -> int:
    """Run requests, some at once; stop listening to some after so many events; count these."""
    gate, stopped = asyncio.Semaphore(AT_ONCE), 0

    async def serve(request, most_events):
        nonlocal stopped
        async with gate, aclosing(client.generate(request)) as events:
            seen = 0
            async for event in events:
                seen += isinstance(event, Delta)
                if most_events is not None and seen >= most_events:
                    stopped += 1
                    return

    await asyncio.gather(*map(serve, requests, cancel_after))
    return stopped


async def rest(client, filler) -> None:
    """Ask once more: when that is answered, all that was cancelled before has been dropped."""
    await client.complete(
        GenerateRequest("rest", filler.prompt("", "And now?"), max_tokens=1, cache=False)
    )


def memory(device: str) -> dict[str, int]:
    if device == "cpu":
        return {}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    names = ("num_device_alloc", "reserved_bytes.all.current", "allocated_bytes.all.current")
    return {name: stats[name] for name in names}


def test_nothing_is_left_behind(client, device, is_small):
    filler, source = Filler(client), random.Random(7)
    count, longest = (20, 60) if is_small else (1000, 1500)
    requests = [request_of(filler, source, number, longest) for number in range(count)]
    cancel_after = [source.choice((None, 0, 1, 3)) for _ in requests]

    async def all_of_it():
        await serve_all(client, requests[:SLOTS], [None] * SLOTS)
        await rest(client, filler)
        before = memory(device)
        stopped = await serve_all(client, requests, cancel_after)
        await rest(client, filler)
        after = memory(device)
        for which in range(6):
            await client.drop_source(f"document-{which}")
        return before, after, stopped

    before, after, stopped = asyncio.run(all_of_it())
    stats = client.stats()
    assert stats.pages_used == 0
    assert stats.segments == 0
    assert 0 < stopped < count
    assert stats.finished + stats.failed == count + SLOTS + 2
    assert after == before
