"""An engine in a process of its own, over a folder of sessions: it answers, or dies as it saves.

Called with the folder, the model file, the number of the write at which it kills itself (0: never)
and numbers of documents; prints one line of JSON an answer.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragflash.engine.build import start_engine
from ragflash.engine.client import EngineClient
from ragflash.engine.request import (
    ChatMessage,
    Finished,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.sessions import FolderArchive, SessionFolder, SessionLimits
from ragflash.sessions.disk import Buffer, Disk

RULES = "Answer from the document alone."
# Around a page's edge and a block's, and elsewhere; the prompt has 68 tokens before the document.
LENGTHS = (188, 189, 400, 444, 445, 700, 790)


class KillingDisk(Disk):
    """Ends the process, as `kill -9` does, in the middle of a write: when none is `left`."""

    def __init__(self, at: int) -> None:
        self.left = at

    def arm(self, at: int) -> None:
        """Let the process end at that write from now on."""
        self.left = at

    def write(self, descriptor: int, data: Buffer, offset: int) -> None:
        self.left -= 1
        if self.left == 0:
            os.pwrite(descriptor, memoryview(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(descriptor, data, offset)


@contextmanager
def engine_on(
    model: Path, sessions: Path | None, kill_at: int = 0, **options: Any
) -> Iterator[tuple[EngineClient, FolderArchive | None]]:
    """Start an engine, over a folder if there is one, with small pages unless `options` differ."""
    folder = archive = None
    if sessions is not None:
        limits = SessionLimits(quota_bytes=1 << 30, min_free_bytes=0)
        folder = SessionFolder.open(sessions, limits, disk=KillingDisk(kill_at))
        archive = FolderArchive(folder)
    defaults: dict[str, Any] = {
        "kv_format": "tq3_0",
        "grid_tokens": 256,
        "kv_bytes": 16 << 20,
        "prefill_chunk_tokens": 96,
        "threads": 1,
    }
    options = {**defaults, **options}
    engine = start_engine(model, device="cpu", dtype="float32", archive=archive, **options)
    try:
        yield engine, archive
    finally:
        engine.close()
        if archive is not None:
            archive.close()
        if folder is not None:
            folder.close()


def ask(engine: EngineClient, number: int, question: str, **options: Any) -> Finished:
    text = "".join(random.Random(number).choices("abcdefgh .\n", k=LENGTHS[number]))
    segments = (
        TextSegment(SegmentKind.DOCUMENT, text, (Span(f"d{number}", 0, 0, len(text)),)),
        TextSegment(SegmentKind.QUESTION, question),
    )
    rules = TextSegment(SegmentKind.RULES, RULES)
    messages = (ChatMessage("system", (rules,)), ChatMessage("user", segments))
    options = {"max_tokens": 6, **options}
    request = GenerateRequest("r", messages, logprobs=True, **options)
    return asyncio.run(engine.complete(request))


def told(engine: EngineClient, number: int, **options: Any) -> dict[str, Any]:
    """Ask, and tell the answer, bit by bit, and what the model computed for it."""
    rows = engine.stats().forward_rows
    found = ask(engine, number, "How often?", **options)
    return {
        "tokens": [*found.token_ids],
        "logprobs": [repr(token) for token in found.logprobs],
        "tier": str(found.tier),
        "miss_reason": found.miss_reason and str(found.miss_reason),
        "computed": found.usage.prompt_tokens - found.usage.cached_tokens,
        "cached": found.usage.cached_tokens,
        "rows": engine.stats().forward_rows - rows,
    }


def main() -> None:
    sessions, model, kill_at, *numbers = sys.argv[1:]
    with engine_on(Path(model), Path(sessions), int(kill_at)) as (engine, archive):
        for number in numbers:
            print(json.dumps(told(engine, int(number))), flush=True)
            if int(kill_at):
                archive.flush()


if __name__ == "__main__":
    main()
