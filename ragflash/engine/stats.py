"""What an engine has done since it started, and is doing now, in plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ragflash.engine.request import Event, Failed, Finished


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at an engine; read without a lock, so numbers may be a step apart.

    Attributes:
        queued: Requests accepted that have no slot, the waiting included.
        waiting: Sequences that wait for a slot.
        running: Sequences that have one.
        finished: Requests that ended well.
        failed: Requests that ended by an error or were cancelled.
        prompt_tokens: Of finished requests; so are the next two.
        cached_tokens: Of these, not computed.
        completion_tokens: Output.
        drafted_tokens: Of finished requests, by source.
        accepted_tokens: Of these, part of the output, by source.
        forward_steps: Calls of the model.
        forward_rows: Rows that they computed.
        segments: Stored prompt segments.
        pages_used: Pages of keys and values that something holds, exact and packed ones.
        pages: All pages of both forms.
        evictions: Segments dropped to make room.
    """

    queued: int
    waiting: int
    running: int
    finished: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: Mapping[str, int]
    accepted_tokens: Mapping[str, int]
    forward_steps: int
    forward_rows: int
    segments: int
    pages_used: int
    pages: int
    evictions: int


@dataclass(slots=True)
class Totals:
    """Sums over the requests that ended; changed by the worker thread only.

    Sums by source are replaced, not changed, so that others may read them meanwhile.
    """

    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: Mapping[str, int] = field(default_factory=dict)
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)

    def count(self, event: Event) -> None:
        """Take an event into account; most change nothing."""
        if isinstance(event, Failed):
            self.failed += 1
        elif isinstance(event, Finished):
            self.finished += 1
            self.prompt_tokens += event.usage.prompt_tokens
            self.cached_tokens += event.usage.cached_tokens
            self.completion_tokens += event.usage.completion_tokens
            drafts = event.timings.drafts
            drafted = {count.source: count.drafted for count in drafts}
            accepted = {count.source: count.accepted for count in drafts}
            self.drafted_tokens = _plus(self.drafted_tokens, drafted)
            self.accepted_tokens = _plus(self.accepted_tokens, accepted)


def _plus(sums: Mapping[str, int], more: Mapping[str, int]) -> Mapping[str, int]:
    return {**sums, **{source: sums.get(source, 0) + count for source, count in more.items()}}
