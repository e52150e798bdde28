"""Stored segments in memory: a radix tree over token ids whose nodes are segments.

A node's key is the hash of its tokens and of all before them, so the tree needs no pointers: a
prompt is looked up by walking its keys. A segment holds the pages of its whole prefix through a
table forked from the sequence that computed it; a page lives as long as any of them holds it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ragflash.kvcache.allocator import PageForm, PagesExhausted
from ragflash.kvcache.grid import PageAllocators
from ragflash.kvcache.segments import (
    NO_PARTS,
    ROOT_KEY,
    ArchivedSegment,
    MissReason,
    OpenSegment,
    Parts,
    PendingSegment,
    SegmentHit,
    SegmentMiss,
    StoredSegment,
    segment_key,
)
from ragflash.kvcache.table import KVTable

T = TypeVar("T")

_EVICTED_KEYS_REMEMBERED = 4096

_Place = tuple[str, str, bytes]  # identity, namespace, key of the segment before


@dataclass(slots=True, eq=False)
class _Node:
    segment: StoredSegment
    tokens: tuple[int, ...]
    place: _Place
    table: KVTable
    num_open: int = 0

    @property
    def own_place(self) -> _Place:
        """Where the segments that follow this one are."""
        return (*self.place[:2], self.segment.key)


class SegmentTree:
    """A `SegmentStore` of segments whose pages are those of `allocators`."""

    def __init__(self, allocators: PageAllocators) -> None:
        self._allocators = allocators
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()  # longest unused first
        self._pending: dict[bytes, _Node] = {}
        self._held: list[tuple[Future[Any], StoredSegment]] = []
        self._num_following: Counter[_Place] = Counter()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._num_evicted = 0

    def __len__(self) -> int:
        """Return how many segments are stored."""
        return len(self._nodes)

    @property
    def num_evicted(self) -> int:
        """See `SegmentStore.num_evicted`."""
        return self._num_evicted

    def stored(self) -> tuple[StoredSegment, ...]:
        """See `SegmentStore.stored`."""
        return tuple(node.segment for node in self._nodes.values())

    def lookup(
        self, segments: Sequence[tuple[int, ...]], *, identity: str, namespace: str
    ) -> SegmentHit | SegmentMiss:
        """See `SegmentStore.lookup`."""
        last: StoredSegment | None = None
        for index, tokens in enumerate(segments):
            place = (identity, namespace, last.key if last else ROOT_KEY)
            key = segment_key(place[2], tokens, identity, namespace)
            node = self._find(key, place, tokens)
            if node is None:
                reason = self._miss_reason(key, place)
                return SegmentHit(last, index, reason) if last else SegmentMiss(reason)
            self._nodes.move_to_end(key)
            last = node.segment
        if last is None:
            return SegmentMiss(MissReason.NONE_STORED)
        return SegmentHit(last, len(segments), None)

    def open(self, hit: SegmentHit) -> OpenSegment:
        """See `SegmentStore.open`."""
        node = self._nodes.get(hit.segment.key)
        if node is None or node.segment is not hit.segment:
            raise ValueError("the segment of this hit is not stored any more")
        node.num_open += 1
        try:
            table, copies = self.make_room(lambda: node.table.fork(node.segment.end))
        except PagesExhausted:
            node.num_open -= 1
            raise
        return OpenSegment(node.segment, table, copies, node.segment.state)

    def close(self, opened: OpenSegment) -> None:
        """See `SegmentStore.close`."""
        node = self._nodes.get(opened.segment.key)
        if node is None or node.segment is not opened.segment:
            return
        if node.num_open == 0:
            raise ValueError("a segment is closed more often than it was opened")
        node.num_open -= 1

    def begin(
        self,
        segments: Sequence[tuple[int, ...]],
        *,
        identity: str,
        namespace: str,
        table: KVTable,
        state: tuple[object, ...],
        source_ids: frozenset[str],
        prefill_seconds: float = 0.0,
        parts: Parts = NO_PARTS,
    ) -> PendingSegment | None:
        """See `SegmentStore.begin`."""
        *before, tokens = segments
        parent: StoredSegment | None = None
        if before:
            hit = self.lookup(before, identity=identity, namespace=namespace)
            if isinstance(hit, SegmentMiss) or hit.reason is not None:
                return None
            parent = hit.segment
        place = (identity, namespace, parent.key if parent else ROOT_KEY)
        key = segment_key(place[2], tokens, identity, namespace)
        if key in self._nodes or key in self._pending:
            return None
        end = len(tokens) + (parent.end if parent else 0)
        own_table, copies = self._hold(place, lambda: table.fork(end))
        all_ids = source_ids | (parent.source_ids if parent else frozenset())
        archived = ArchivedSegment(state, all_ids, prefill_seconds, parts)
        return PendingSegment(self._add(key, tokens, place, own_table, archived), copies)

    def begin_archived(
        self,
        segments: Sequence[tuple[int, ...]],
        found: Sequence[ArchivedSegment],
        *,
        identity: str,
        namespace: str,
    ) -> tuple[PendingSegment, ...]:
        """See `SegmentStore.begin_archived`."""
        before = segments[: len(segments) - len(found)]
        key, table = ROOT_KEY, self._allocators.new_table()
        if before:
            hit = self.lookup(before, identity=identity, namespace=namespace)
            if isinstance(hit, SegmentMiss) or hit.reason is not None:
                raise ValueError("a segment before an archived one is not stored")
            key = hit.segment.key
            table = self._nodes[key].table
        begun: list[PendingSegment] = []
        try:
            for tokens, archived in zip(segments[len(before) :], found, strict=True):
                place = (identity, namespace, key)
                key = segment_key(place[2], tokens, identity, namespace)
                table = self._hold(place, partial(table.extended, table.length + len(tokens)))
                begun.append(PendingSegment(self._add(key, tokens, place, table, archived), ()))
        except BaseException:
            for pending in begun:
                self.abandon(pending)
            raise
        return tuple(begun)

    def commit(self, pending: PendingSegment) -> None:
        """See `SegmentStore.commit`; a segment whose source was dropped meanwhile is not stored."""
        node = self._take_pending(pending)
        if node is not None:
            self._nodes[node.segment.key] = node
            self._evicted.pop(node.segment.key, None)

    def abandon(self, pending: PendingSegment) -> None:
        """See `SegmentStore.abandon`."""
        node = self._take_pending(pending)
        if node is not None:
            self._forget(node)

    def hold(self, segment: StoredSegment, until: Future[Any]) -> None:
        """See `SegmentStore.hold`."""
        self._let_go()
        if not until.done():
            for form, pages in _pages_of(segment):
                self._allocators.of(form).retain(pages)
            self._held.append((until, segment))

    def evict(self, num_pages: int, form: PageForm = PageForm.EXACT) -> int:
        """See `SegmentStore.evict`."""
        allocator = self._allocators.of(form)
        free_before = allocator.num_free
        while allocator.num_free < free_before + num_pages:
            victim = next((n for n in self._nodes.values() if self._is_evictable(n, form)), None)
            if victim is None:
                break
            del self._nodes[victim.segment.key]
            self._forget(victim)
            self._num_evicted += 1
            self._evicted[victim.segment.key] = None
            if len(self._evicted) > _EVICTED_KEYS_REMEMBERED:
                self._evicted.popitem(last=False)
        return allocator.num_free - free_before

    def make_room(self, take: Callable[[], T]) -> T:
        """See `SegmentStore.make_room`."""
        self._let_go()
        while True:
            try:
                return take()
            except PagesExhausted as error:
                if self.evict(error.wanted - error.free, error.form) == 0:
                    if not self._held:
                        raise
                    wait([until for until, _ in self._held])
                    self._let_go()

    def drop_source(self, source_id: str) -> int:
        """See `SegmentStore.drop_source`."""
        return self._drop([n for n in self._all() if source_id in n.segment.source_ids])

    def drop_all(self) -> int:
        """See `SegmentStore.drop_all`."""
        self._evicted.clear()
        return self._drop(self._all())

    def _let_go(self) -> None:
        """Give back the pages that are held for something that is done."""
        held, self._held = self._held, []
        for until, segment in held:
            if until.done():
                for form, pages in _pages_of(segment):
                    self._allocators.of(form).release(pages)
            else:
                self._held.append((until, segment))

    def _hold(self, place: _Place, take: Callable[[], T]) -> T:
        """Take pages for a segment at a place; from here on the one before it is not evicted."""
        self._num_following[place] += 1
        try:
            return self.make_room(take)
        except BaseException:
            self._num_following[place] -= 1
            raise

    def _add(
        self,
        key: bytes,
        tokens: tuple[int, ...],
        place: _Place,
        table: KVTable,
        archived: ArchivedSegment,
    ) -> StoredSegment:
        """Note a segment that no lookup finds yet."""
        segment = StoredSegment(
            key=key,
            parent=place[2],
            num_tokens=len(tokens),
            end=table.length,
            pages=table.pages,
            packed_pages=table.packed_pages,
            state=archived.state,
            source_ids=archived.source_ids,
            prefill_seconds=archived.prefill_seconds,
            parts=archived.parts,
        )
        self._pending[key] = _Node(segment, tokens, place, table)
        return segment

    def _find(self, key: bytes, place: _Place, tokens: tuple[int, ...]) -> _Node | None:
        """Return the node of a key if it holds these tokens; equal hashes alone prove nothing."""
        node = self._nodes.get(key)
        return node if node and node.place == place and node.tokens == tokens else None

    def _miss_reason(self, key: bytes, place: _Place) -> MissReason:
        if key in self._evicted:
            return MissReason.EVICTED
        if self._num_following[place] > 0:
            return MissReason.PREFIX_DIFFERS
        return MissReason.NONE_STORED

    def _is_evictable(self, node: _Node, form: PageForm) -> bool:
        if node.num_open or self._num_following[node.own_place]:
            return False
        return node.table.holds(form)

    def _all(self) -> list[_Node]:
        return [*self._nodes.values(), *self._pending.values()]

    def _drop(self, nodes: list[_Node]) -> int:
        for node in nodes:
            self._nodes.pop(node.segment.key, None)
            self._pending.pop(node.segment.key, None)
            self._forget(node)
        return len(nodes)

    def _take_pending(self, pending: PendingSegment) -> _Node | None:
        node = self._pending.get(pending.segment.key)
        if node is None or node.segment is not pending.segment:
            return None
        return self._pending.pop(node.segment.key)

    def _forget(self, node: _Node) -> None:
        node.table.release()
        self._num_following[node.place] -= 1
        if self._num_following[node.place] == 0:
            del self._num_following[node.place]


def _pages_of(segment: StoredSegment) -> list[tuple[PageForm, tuple[int, ...]]]:
    """Return the pages of a segment, a form at a time; there may be none of a form at all."""
    pages = ((PageForm.EXACT, segment.pages), (PageForm.PACKED, segment.packed_pages))
    return [(form, numbers) for form, numbers in pages if numbers]
