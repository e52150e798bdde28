"""One request while the engine works on it; holds no tensor.

    WAITING → PREFILLING → DECODING → FINISHED

`tokens` are all tokens known so far, prompt and output. Those before `committed` are in the cache;
those after it are rows for the next forward, be they a chunk of prompt, text that a constraint
forces, or the one token sampled last.
"""

import secrets
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.constrain.mask import Ids
from ragflash.engine.job import Job
from ragflash.engine.logprobs import TokenLogprob
from ragflash.engine.output import Output
from ragflash.engine.request import (
    DraftCount,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Scored,
    SegmentKind,
    Timings,
    Usage,
)
from ragflash.errors import RagflashError
from ragflash.kvcache.segments import OpenSegment
from ragflash.kvcache.table import KVTable
from ragflash.speculative.drafter import Draft, Drafter

if TYPE_CHECKING:
    from ragflash.speculative.rows import RowDrafter  # imports torch

ARCHIVED_KINDS = frozenset({SegmentKind.RULES, SegmentKind.DOCUMENT, SegmentKind.CONVERSATION})
STORED_KINDS = ARCHIVED_KINDS | {SegmentKind.PASSAGES}


class Phase(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True)
class Counters:
    """What a sequence cost, and when what happened (seconds of the monotonic clock)."""

    admitted_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    segment_began_at: float = 0.0
    cached_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0
    forward_rows: int = 0


@dataclass(slots=True)
class DraftCounts:
    """Tokens drafted and accepted by source, and steps without a draft by the reason."""

    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)

    def count(self, draft: Draft, accepted: Iterable[int]) -> None:
        """Take what was verified into account, and which tokens of it held."""
        self.drafted.update(draft.source_of(index) for index in range(len(draft)))
        self.accepted.update(draft.source_of(index) for index in accepted)
        if draft.reason is not None:
            self.idle[draft.reason] += 1

    def by_source(self) -> tuple[DraftCount, ...]:
        """Return the counts of each source."""
        return tuple(
            DraftCount(source, drafted, self.accepted[source])
            for source, drafted in self.drafted.items()
        )


@dataclass(slots=True)
class Cache:
    """What a sequence holds of the device, from admission to its end.

    Attributes:
        table: Its pages.
        slot: Its recurrent-state slot.
        opened: The stored segment that it continues.
    """

    table: KVTable
    slot: int
    opened: OpenSegment | None


class Sequence:
    """A request in flight; changed by the worker thread only.

    Attributes:
        tokens: Prompt and output.
        output: Of a generation; `None` when targets are scored.
        logprobs: Of the targets scored so far.
        num_target_rows: Rows computed of the target that is scored next, or in part already.
        cache: `None` before admission and after the end.
        drafter: Of its output; `None` decodes plainly.
        row_drafters: Those that are told its rows, by the names of their parts.
    """

    def __init__(self, job: Job, output: Output | None) -> None:
        self.job = job
        self.output = output
        self.drafter: Drafter | None = None
        self.row_drafters: Mapping[str, RowDrafter] = {}
        self.phase = Phase.WAITING
        self.tokens = list(job.prompt.token_ids)
        self.num_prompt = len(self.tokens)
        self.ends = job.prompt.ends
        self.logprobs: list[float] = []
        self.num_target_rows = 0
        self._target_logprob = 0.0
        self.cache: Cache | None = None
        self.miss_reason: CacheMiss | None = None
        self.miss_field: str | None = None
        self.counters = Counters()
        self.drafts = DraftCounts()

    @property
    def id(self) -> str:
        """The request's id."""
        return self.job.request.id

    @property
    def is_background(self) -> bool:
        """Whether it runs only while no other does."""
        request = self.job.request
        return isinstance(request, GenerateRequest) and request.background

    @property
    def committed(self) -> int:
        """Tokens in the cache."""
        return self.cache.table.length if self.cache is not None else 0

    @property
    def prefill_end(self) -> int:
        """Tokens to commit before output; scoring computes the last one with every target."""
        return self.num_prompt if self.output is not None else self.num_prompt - 1

    @property
    def target(self) -> tuple[int, ...] | None:
        """The target to score next."""
        scored = len(self.logprobs)
        return self.job.targets[scored] if scored < len(self.job.targets) else None

    @property
    def tier(self) -> CacheTier:
        """Where the cached tokens were."""
        if self.counters.cached_tokens == 0:
            return CacheTier.NONE
        return CacheTier.FILE if self.counters.restored_tokens else CacheTier.DEVICE

    @cached_property
    def sampling(self) -> SamplingParams:
        """How its tokens are picked."""
        request = self.job.request
        return request.sampling if isinstance(request, GenerateRequest) else SamplingParams()

    @property
    def takes_largest(self) -> bool:
        """Whether it looks at nothing of its logits but which is the largest."""
        output = self.output
        return (
            output is not None
            and output.cursor is None
            and output.num_top is None
            and self.sampling.is_plain_greedy
        )

    @cached_property
    def seed(self) -> int:
        """Of all its draws."""
        seed = self.sampling.seed
        return secrets.randbits(63) if seed is None else seed

    @cached_property
    def prompt_ids(self) -> Ids:
        """Distinct tokens of the prompt."""
        return np.unique(np.asarray(self.job.prompt.token_ids, dtype=np.int64))

    @property
    def room(self) -> int:
        """Most rows that the next forward may have, drafts included."""
        return self.cache.table.room if self.cache is not None else 0

    def num_next_rows(self, chunk_tokens: int, score_tokens: int) -> int:
        """Count rows for the next forward but drafts.

        Args:
            chunk_tokens: Most of a prompt; a chunk ends where its segment ends in any case.
            score_tokens: Most of a target of which more is left for later: they are committed.
        """
        if self.phase is Phase.PREFILLING:
            return min(chunk_tokens, self._next_break() - self.committed, self.room)
        if self.output is not None:
            return min(len(self.tokens) - self.committed, self.room)
        num_left, most = len(self.target or ()) - self.num_target_rows, min(chunk_tokens, self.room)
        return num_left if num_left <= most else min(score_tokens, most)

    @property
    def must_restart(self) -> bool:
        """Whether the next target cannot be scored: part of another is in the cache behind it."""
        is_between = self.output is None and self.num_target_rows == 0
        return is_between and self.committed > self.prefill_end

    def settle(self) -> None:
        """Go over to decoding once the prompt is in the cache."""
        if self.phase is Phase.PREFILLING and self.committed >= self.prefill_end:
            self.phase = Phase.DECODING

    def segment_ending_at(self, num_tokens: int) -> int | None:
        """Return the index of the segment that ends there and may be stored."""
        if num_tokens not in self.ends[:-1]:
            return None
        at = self.ends.index(num_tokens)
        return at if self.job.prompt.segments[at].kind in STORED_KINDS else None

    @cached_property
    def stored_segments(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of the segments at the start of the prompt that may all be stored."""
        return self._first_of(STORED_KINDS)

    @cached_property
    def archived_segments(self) -> tuple[tuple[int, ...], ...]:
        """Those of them that may all be kept in files."""
        return self._first_of(ARCHIVED_KINDS)

    def end_segment(self) -> float:
        """Return the seconds since the segment before ended."""
        began_at, now = self.counters.segment_began_at, time.perf_counter()
        self.counters.segment_began_at = now
        return now - began_at

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> bool:
        """Take an output token; return whether more may follow."""
        assert self.output is not None
        self._mark_time()
        self.tokens.append(token_id)
        return self.output.append(token_id, logprob)

    def add_score(self, logprob: float, num_rows: int) -> bool:
        """Take the log-probability of the next rows of `target`; return whether more follow."""
        assert self.target is not None
        self._mark_time()
        self._target_logprob += logprob
        self.num_target_rows += num_rows
        if self.num_target_rows < len(self.target):
            return True
        self.logprobs.append(self._target_logprob)
        self.num_target_rows, self._target_logprob = 0, 0.0
        return False

    def force(self) -> None:
        """Take the output tokens that need no decision."""
        if self.output is not None:
            self.tokens += self.output.force()

    def finish(self, reason: FinishReason) -> tuple[Event, ...]:
        """End the request well; return its last events."""
        self._end()
        output = self.output
        scored = Scored(self.id, tuple(self.logprobs), tuple(map(len, self.job.targets)))
        finished = Finished(
            request_id=self.id,
            text=output.text if output else "",
            token_ids=tuple(output.token_ids) if output else (),
            reason=reason,
            usage=self._usage(),
            timings=self._timings(),
            miss_reason=self.miss_reason,
            miss_field=self.miss_field,
            tier=self.tier,
            quotes=output.quotes(self.job.prompt.source_ids) if output else (),
            num_shown=output.num_shown if output else 0,
            logprobs=tuple(output.logprobs) if output else (),
        )
        return (finished,) if output else (scored, finished)

    def fail(self, error: RagflashError) -> tuple[Event, ...]:
        """End the request by an error; return its last event."""
        self._end()
        return (Failed(self.id, error),)

    def _end(self) -> None:
        self.phase = Phase.FINISHED
        self.drafter, self.row_drafters = None, {}  # they may hold on to it, and to much memory

    def _mark_time(self) -> None:
        now = time.perf_counter()
        if self.counters.first_token_at is None:
            self.counters.first_token_at = now
        self.counters.last_token_at = now

    def _next_break(self) -> int:
        at = bisect_right(self.ends, self.committed)
        if at < len(self.ends) - 1:
            return self.ends[at]
        return len(self.tokens) if self.output is not None else self.prefill_end

    def _first_of(self, kinds: frozenset[SegmentKind]) -> tuple[tuple[int, ...], ...]:
        # The last segment is computed in any case: its last row gives the first token.
        before = self.job.prompt.segments[:-1]
        kept = takewhile(lambda segment: segment.kind in kinds, before)
        return tuple(segment.token_ids for segment in kept)

    def _num_output(self) -> int:
        return len(self.output.token_ids) if self.output else 0

    def _usage(self) -> Usage:
        return Usage(self.num_prompt, self._num_output(), self.counters.cached_tokens)

    def _timings(self) -> Timings:
        counters, submitted = self.counters, self.job.submitted_at
        first = counters.first_token_at
        last = counters.last_token_at
        return Timings(
            queue_ms=1000 * (counters.admitted_at - submitted),
            prompt_n=self.num_prompt - counters.cached_tokens,
            cache_n=counters.cached_tokens,
            prompt_ms=1000 * (first - counters.admitted_at) if first is not None else 0.0,
            predicted_n=self._num_output(),
            predicted_ms=1000 * (last - first) if first is not None else 0.0,
            ttft_ms=1000 * (first - submitted) if first is not None else 0.0,
            draft_n=sum(self.drafts.drafted.values()),
            draft_n_accepted=sum(self.drafts.accepted.values()),
            drafts=self.drafts.by_source(),
            idle_steps=tuple(self.drafts.idle.items()),
            forward_rows=counters.forward_rows,
            restore_ms=1000 * counters.restore_s,
            restore_gb_s=counters.restored_bytes / counters.restore_s / 1e9
            if counters.restore_s > 0
            else 0.0,
        )


DrafterFactory = Callable[[Sequence], Drafter | None]
"""Makes the drafter of a sequence, which has its job and its `row_drafters` by then."""
