"""What an engine has done since it started, and is doing now, in plain numbers."""

from dataclasses import dataclass

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
        drafted_tokens: Of finished requests.
        accepted_tokens: Of these, part of the output.
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
    drafted_tokens: int
    accepted_tokens: int
    forward_steps: int
    forward_rows: int
    segments: int
    pages_used: int
    pages: int
    evictions: int


@dataclass(slots=True)
class Totals:
    """Sums over the requests that ended; changed by the worker thread only."""

    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def count(self, event: Event) -> None:
        """Take an event into account; most change nothing."""
        if isinstance(event, Failed):
            self.failed += 1
        elif isinstance(event, Finished):
            self.finished += 1
            self.prompt_tokens += event.usage.prompt_tokens
            self.cached_tokens += event.usage.cached_tokens
            self.completion_tokens += event.usage.completion_tokens
            self.drafted_tokens += event.timings.draft_n
            self.accepted_tokens += event.timings.draft_n_accepted
