"""What a client hands to the worker: a request with all that can be prepared without the model."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ragflash import log
from ragflash.engine.constrain import Cursor
from ragflash.engine.prompt import CompiledPrompt
from ragflash.engine.request import Event, Request
from ragflash.speculative.lookup import LookupDrafter


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request on its way through the engine.

    Attributes:
        max_tokens: Of the output, clamped to the context.
        cursor: The compiled constraint; the worker's own from submission on.
        targets: Token ids of the texts to score.
        lookup: Drafts from the prompt and the output; the worker's own from submission on.
        emit: Takes events, from the worker thread; it does not block.
        submitted_at: Seconds of the monotonic clock.
        trace: Id of the HTTP request that it serves, for the log; empty outside a server.
        cancelled: Set from any thread when nobody waits for events any more.
    """

    request: Request
    prompt: CompiledPrompt
    max_tokens: int
    cursor: Cursor | None
    targets: tuple[tuple[int, ...], ...]
    emit: Callable[[Event], None]
    submitted_at: float
    lookup: LookupDrafter | None = None
    trace: str = field(default_factory=log.request_id.get)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def num_rows(self) -> int:
        """Most tokens that its keys and values take up."""
        longest_target = max((len(target) for target in self.targets), default=0)
        return len(self.prompt.sources.source) + max(self.max_tokens, longest_target)
