"""Which sequences run, and how many rows each puts into the next forward. Holds no tensor.

A sequence is admitted when a slot and all pages that it can ever need are there, so that one that
runs is never stopped for want of memory. Every step takes the pending rows of all decoding
sequences and chunks of prompts in turn: nobody's answer waits for the whole of somebody else's
prompt. Chunks end where segments and blocks of the grid end, so that a prompt whose beginning is
stored is computed in the same pieces as one that is not, whoever runs beside it.

A background sequence gets rows only while no other runs and nobody holds it off. It keeps its place
meanwhile, unless that is needed, or others have stored more of its prompt: then it begins anew.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragflash.engine.cache import CacheMiss
from ragflash.engine.request import GenerateRequest
from ragflash.engine.sequence import Cache, Phase, Sequence
from ragflash.errors import EngineOverloaded
from ragflash.kvcache.allocator import PagesExhausted
from ragflash.kvcache.archive import FileMiss, FileMissReason
from ragflash.kvcache.grid import PageAllocators
from ragflash.kvcache.segments import (
    MissReason,
    OpenSegment,
    SegmentHit,
    SegmentMiss,
    SegmentStore,
)
from ragflash.kvcache.table import KVTable

if TYPE_CHECKING:
    from ragflash.engine.file_tier import FileTier  # imports torch

_log = logging.getLogger(__name__)

_MISSES = {
    MissReason.NONE_STORED: CacheMiss.NONE_STORED,
    MissReason.PREFIX_DIFFERS: CacheMiss.PREFIX_DIFFERS,
    MissReason.EVICTED: CacheMiss.EVICTED,
}


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Rows of one sequence in a step, drafts not counted; at least 1."""

    sequence: Sequence
    num_rows: int


class Scheduler:
    """Queue, slots and turns.

    Args:
        allocators: Of the pages.
        store: Of segments; gives pages back on demand.
        identity: All that stored keys and values depend on but tokens.
        max_slots: Sequences that run together.
        chunk_tokens: Most prompt rows of one sequence in a step.
        score_tokens: Most rows of a target that does not fit one step; `None` is as of a prompt.
        files: Brings segments back that memory has not.
    """

    def __init__(
        self,
        *,
        allocators: PageAllocators,
        store: SegmentStore,
        identity: str,
        max_slots: int,
        chunk_tokens: int,
        score_tokens: int | None = None,
        files: "FileTier | None" = None,
    ) -> None:
        self._allocators = allocators
        self._store = store
        self._identity = identity
        self._chunk_tokens = chunk_tokens
        self._score_tokens = chunk_tokens if score_tokens is None else score_tokens
        self._files = files
        self._free_slots = list(range(max_slots))[::-1]
        self._lacks_pages = False
        self._num_holds = 0
        self._has_news = False  # from sequences that ended since the background was looked at
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences in flight."""
        yield from self.running
        yield from self.waiting

    @property
    def num_pages(self) -> int:
        """Pages that there are."""
        return self._allocators.num_pages

    @property
    def num_pages_used(self) -> int:
        """Pages that sequences or stored segments hold."""
        return self._allocators.num_pages - self._allocators.num_free

    @property
    def is_resting(self) -> bool:
        """Whether there is nothing but background sequences that are held off, if anything."""
        return all(sequence.is_background and self._num_holds for sequence in self)

    def hold(self, change: int) -> None:
        """Count one more, or one less, who holds the background off."""
        self._num_holds += change

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, before those of the background unless it is one."""
        num_ahead = len(self.waiting)
        if not sequence.is_background:
            num_ahead -= sum(other.is_background for other in self.waiting)
        self.waiting.insert(num_ahead, sequence)

    def admit(self) -> Sequence | None:
        """Start the first waiting sequence if it fits; its `cache.opened` tells what to restore.

        Raises:
            EngineOverloaded: It would not fit an empty engine; it is out of the queue.
        """
        if not self.waiting or not self._has_place(self.waiting[0]) or self._lacks_pages:
            return None
        began_at = time.perf_counter()
        sequence = self.waiting[0]
        reason = sequence.miss_reason
        opened, table = self._open(sequence), None
        try:
            table = self._reserve(sequence, opened)
        except PagesExhausted as error:
            self._close(opened)
            if self._interrupt():
                return self.admit()
            if self.running:
                self._lacks_pages = True
                return None
            table, opened = self._reserve_cold(sequence, error), None
        self.waiting.popleft()
        sequence.cache = Cache(table, self._free_slots.pop(), opened)
        if sequence.logprobs:  # it was admitted before, and that time counts
            sequence.miss_reason = reason
        else:
            sequence.counters.cached_tokens = table.length
            sequence.counters.admitted_at = began_at
            _log_reuse(sequence)
        sequence.phase = Phase.PREFILLING
        sequence.settle()
        sequence.end_segment()
        self.running.append(sequence)
        return sequence

    def plan(self) -> list[PlannedRows]:
        """Choose the next step's rows; whoever gets a prompt chunk goes to the end of the line."""
        planned, served = [], []
        budget = self._chunk_tokens
        awake = [sequence for sequence in self.running if not sequence.is_background]
        if not awake and not self._num_holds and not self._is_overtaken():
            awake = [*self.running]
        for sequence in awake:
            num_rows = sequence.num_next_rows(self._chunk_tokens, self._score_tokens)
            if sequence.phase is Phase.PREFILLING:
                if num_rows > budget:
                    continue
                budget -= num_rows
                served.append(sequence)
            planned.append(PlannedRows(sequence, num_rows))
        for sequence in served:
            self.running.remove(sequence)
            self.running.append(sequence)
        return planned

    def retire(self, sequence: Sequence) -> None:
        """Take a sequence out and give back all that it holds."""
        if sequence.cache is None:
            self.waiting.remove(sequence)
        else:
            self._give_back(sequence, sequence.cache)

    def restart(self, sequence: Sequence) -> None:
        """Have a running sequence begin with its prompt anew, from what is stored of it."""
        self._stop(sequence)
        self.waiting.appendleft(sequence)

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether there is a slot for a sequence, and its turn has come."""
        if sequence.is_background and (self.running or self._num_holds):
            return False
        return bool(self._free_slots) or self._interrupt()

    def _is_overtaken(self) -> bool:
        """Whether more is stored of the background sequence than it has; then it begins anew."""
        is_due, self._has_news = self._has_news, False
        for sequence in self.running if is_due else ():
            if not sequence.job.request.cache:
                continue
            found = self._store.lookup(
                sequence.stored_segments,
                identity=self._identity,
                namespace=sequence.job.request.namespace,
            )
            if isinstance(found, SegmentHit) and found.segment.end > sequence.committed:
                return self._interrupt()
        return False

    def _interrupt(self) -> bool:
        """Have the background sequence that runs, if any, give its place up."""
        for sequence in self.running:
            if sequence.is_background:
                self._stop(sequence)
                self.waiting.append(sequence)
                return True
        return False

    def _stop(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        self._give_back(sequence, sequence.cache)
        sequence.phase = Phase.WAITING

    def _give_back(self, sequence: Sequence, cache: Cache) -> None:
        self.running.remove(sequence)
        self._has_news |= not sequence.is_background
        self._close(cache.opened)
        cache.table.release()
        self._free_slots.append(cache.slot)
        sequence.cache = None
        self._lacks_pages = False

    def _open(self, sequence: Sequence) -> OpenSegment | None:
        request = sequence.job.request
        if not request.cache:
            sequence.miss_reason = CacheMiss.DISABLED
            return None
        segments = sequence.stored_segments
        if not segments:
            return None
        found = self._store.lookup(segments, identity=self._identity, namespace=request.namespace)
        miss = self._restore(sequence, None if isinstance(found, SegmentMiss) else found)
        if sequence.counters.restored_tokens:
            found = self._store.lookup(
                segments, identity=self._identity, namespace=request.namespace
            )
        sequence.miss_reason = None if found.reason is None else _MISSES[found.reason]
        if miss is not None and miss.reason is not FileMissReason.NONE_STORED:
            sequence.miss_reason, sequence.miss_field = CacheMiss(miss.reason.value), miss.field
        is_moved = isinstance(request, GenerateRequest) and request.client_prefix
        if sequence.miss_reason is not None and is_moved:
            sequence.miss_reason, sequence.miss_field = CacheMiss.CLIENT_PREFIX, None
        if isinstance(found, SegmentMiss):
            return None
        try:
            return self._store.open(found)
        except PagesExhausted:
            sequence.miss_reason = CacheMiss.EVICTED
            return None

    def _restore(self, sequence: Sequence, known: SegmentHit | None) -> FileMiss | None:
        """Bring back what files have beyond memory; return why that is not more."""
        wanted = sequence.archived_segments
        if self._files is None or (known is not None and known.num_segments >= len(wanted)):
            return None
        job, counters = sequence.job, sequence.counters
        restored = self._files.restore(wanted, known, job.request.namespace, job.cancelled.is_set)
        counters.restored_tokens += restored.num_tokens
        counters.restored_bytes += restored.num_bytes
        counters.restore_s += restored.seconds
        return restored.miss

    def _reserve(self, sequence: Sequence, opened: OpenSegment | None) -> KVTable:
        """Hold all pages of a sequence, those of `opened` included, evicting segments as needed."""
        table = opened.table if opened is not None else self._allocators.new_table()
        num_tokens = sequence.job.num_rows - table.length
        try:
            self._store.make_room(lambda: table.reserve(num_tokens))
        except PagesExhausted:
            table.release()
            raise
        return table

    def _reserve_cold(self, sequence: Sequence, cause: PagesExhausted) -> KVTable:
        """Have an idle engine forget all it stores for a sequence that needs every page."""
        self._store.drop_all()
        sequence.miss_reason = CacheMiss.EVICTED
        try:
            return self._reserve(sequence, None)
        except PagesExhausted:
            self.waiting.popleft()
            sequence.cache = None
            raise EngineOverloaded(f"the page pool is too small: {cause}") from cause

    def _close(self, opened: OpenSegment | None) -> None:
        if opened is not None:
            self._store.close(opened)


def _log_reuse(sequence: Sequence) -> None:
    """Say what of a prompt need not be computed, and why that is not more."""
    if not sequence.job.request.cache:
        return
    fields = {
        "request_id": sequence.job.trace,
        "generation": sequence.id,
        "prompt_tokens": sequence.num_prompt,
        "cached_tokens": sequence.counters.cached_tokens,
        "tier": str(sequence.tier),
        "miss_reason": str(sequence.miss_reason or "none"),
        "miss_field": sequence.miss_field or "none",
    }
    _log.info("prompt admitted", extra=fields)
