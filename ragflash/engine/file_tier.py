"""Stored segments on their way between memory and an archive; for the worker thread only."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, takewhile

import torch

from ragflash.kvcache.allocator import PAGE_TOKENS, PageForm, PagesExhausted
from ragflash.kvcache.archive import (
    ArchivedItem,
    ArchiveHit,
    FileMiss,
    FileMissReason,
    Landing,
    MemoryLanding,
    PageItem,
    PartItem,
    SegmentArchive,
    SegmentCopy,
    SnapshotItem,
)
from ragflash.kvcache.identity import DRAFTER_PART, MTP_PART, Identity
from ragflash.kvcache.mover import PageImage, PageMover, landing_in
from ragflash.kvcache.segments import (
    ArchivedSegment,
    PendingSegment,
    SegmentHit,
    SegmentMiss,
    SegmentStore,
    StoredSegment,
)

_log = logging.getLogger(__name__)

_Target = tuple[ArchivedItem, Landing]

Prompt = Sequence[tuple[int, ...]]
"""Tokens from the start of a prompt, cut into segments."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What an archive gave.

    Attributes:
        num_tokens: That are in memory now and were not before.
        num_bytes: Read for them.
        seconds: That it took.
        miss: Why there are not more; `None` when it is the whole prompt.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    miss: FileMiss | None = None


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of a segment: its form, its number in the sequence and in the pool."""

    form: PageForm
    index: int
    page: int

    def num_tokens(self, end: int) -> int:
        """Count its tokens in a segment that ends at `end`."""
        return min(PAGE_TOKENS, end - self.index * PAGE_TOKENS)


class FileTier:
    """Saves stored segments, and brings them back when memory has none.

    Args:
        archive: Of segments.
        mover: Of pages and states; closed with the tier.
        store: Of segments in memory; its identities are digests of `identity`.
        identity: All that keys and values depend on but tokens.
    """

    def __init__(
        self,
        archive: SegmentArchive,
        mover: PageMover,
        store: SegmentStore,
        identity: Identity,
    ) -> None:
        self._archive = archive
        self._mover = mover
        self._store = store
        self._identity = identity
        self._dropped: set[str] = set()

    def close(self) -> None:
        """Wait for copies that are under way; what is to be saved no longer needs the pages."""
        self._mover.close()

    def drop_source(self, source_id: str) -> None:
        """Never again bring back what holds text of a document."""
        self._dropped.add(source_id)

    def save(self, segments: Prompt, namespace: str) -> None:
        """Have all of these segments written that memory has and the archive has not."""
        wanted = self._archive.missing(segments, identity=self._identity, namespace=namespace)
        for index in wanted:
            prompt = tuple(segments[: index + 1])
            found = self._store.lookup(prompt, identity=self._identity.digest, namespace=namespace)
            if isinstance(found, SegmentMiss) or found.reason is not None:
                return
            if not self._save(prompt, found.segment, namespace):
                _log.warning("a session was not saved", extra={"reason": "too many wait"})
                return

    def restore(
        self,
        segments: Prompt,
        known: SegmentHit | None,
        namespace: str,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Restored:
        """Bring back the longest run of segments that is longer than what memory has.

        Args:
            segments: All that may be archived of a prompt.
            known: The first of them, which memory has.
            namespace: Of the request.
            is_over: Whether nobody waits for it any more; asked between items.
        """
        started = time.perf_counter()
        num_known = known.num_segments if known is not None else 0
        hit = self._archive.find(segments, identity=self._identity, namespace=namespace)
        if isinstance(hit, FileMiss):
            return Restored(miss=hit)
        try:
            if hit.num_segments <= num_known:
                return Restored(miss=hit.miss if hit.num_segments == num_known else None)
            if not self._dropped.isdisjoint(hit.source_ids):
                return Restored(miss=FileMiss(FileMissReason.NONE_STORED))
            run = segments[: hit.num_segments]
            read = self._read(run, known, namespace, hit, is_over)
        finally:
            hit.close()
        if isinstance(read, FileMiss):
            fields = {"reason": str(read), "detail": read.detail}
            _log.warning("a stored session is not used", extra=fields)
            return Restored(miss=read)
        num_tokens = sum(map(len, run[num_known:]))
        return Restored(num_tokens, read, time.perf_counter() - started, hit.miss)

    def _save(self, prompt: tuple[tuple[int, ...], ...], segment: StoredSegment, name: str) -> bool:
        start = segment.end - segment.num_tokens
        parent = None
        if start:
            before = self._store.lookup(prompt[:-1], identity=self._identity.digest, namespace=name)
            assert not isinstance(before, SegmentMiss)
            parent = before.segment
        pages = [page for page in _pages(segment) if self._is_own(page, parent)]
        state = [tensor for tensor in segment.state if isinstance(tensor, torch.Tensor)]
        parts = [memoryview(part) for part in segment.parts.values()]
        num_bytes = sum(self._mover.page_bytes(page.form) for page in pages)
        num_bytes += sum(tensor.nbytes for tensor in state) + sum(part.nbytes for part in parts)

        def copy() -> SegmentCopy:
            images = [
                PageImage(page.form, page.page, page.num_tokens(segment.end)) for page in pages
            ]
            fetched = self._mover.fetch(images, state)
            self._store.hold(segment, fetched)
            page_items = (
                PageItem(page.form, page.index, image.num_tokens, self._mover.page_bytes(page.form))
                for page, image in zip(pages, images, strict=True)
            )
            state_items = (
                SnapshotItem(segment.end, index, tensor.nbytes)
                for index, tensor in enumerate(state)
            )
            part_items = (PartItem(name, len(part)) for name, part in segment.parts.items())
            return SegmentCopy(
                segments=prompt,
                identity=self._identity,
                namespace=name,
                source_ids=segment.source_ids,
                items=(*page_items, *state_items, *part_items),
                buffers=chain(_drawn(fetched), parts),
                prefill_seconds=segment.prefill_seconds,
            )

        return self._archive.save(num_bytes, copy)

    def _is_own(self, page: _Page, parent: StoredSegment | None) -> bool:
        """Whether a page is no page of the segment before, or has more tokens than there."""
        if self._mover.page_bytes(page.form) == 0:
            return False
        if parent is None:
            return True
        if page.form is PageForm.PACKED:
            return page.index > len(parent.packed_pages)
        return page.index >= parent.end // PAGE_TOKENS

    def _read(
        self,
        run: Prompt,
        known: SegmentHit | None,
        namespace: str,
        hit: ArchiveHit,
        is_over: Callable[[], bool],
    ) -> int | FileMiss:
        """Read all segments that are not known, and store them at once; return their bytes."""
        num_known = known.num_segments if known is not None else 0
        prefixes = [hit.prefix(at) for at in range(num_known + 1, len(run) + 1)]
        try:
            begun = self._store.begin_archived(
                run,
                [self._archived(prefix) for prefix in prefixes],
                identity=self._identity.digest,
                namespace=namespace,
            )
        except PagesExhausted:
            return FileMiss(FileMissReason.EVICTED, detail="no page is free")
        is_read = False
        try:
            landings = self._lay_out(begun, prefixes, known)
            with self._mover.filling():
                miss = self._archive.read(_until(is_over, landings))
            if miss is not None:
                return miss
            if is_over():
                return FileMiss(FileMissReason.NONE_STORED, detail="the request was cancelled")
            is_read = True
            return sum(landing.num_bytes for _, landing in landings)
        except _ItemLacking as error:
            return FileMiss(FileMissReason.DAMAGED, detail=str(error))
        finally:
            for pending in begun:
                (self._store.commit if is_read else self._store.abandon)(pending)

    def _archived(self, prefix: ArchiveHit) -> ArchivedSegment:
        state = self._mover.new_state()
        parts = {
            name: bytearray(found.item.num_bytes)
            for name in (MTP_PART, DRAFTER_PART)
            if self._identity.of_part(name)
            and not isinstance(found := prefix.part(name), FileMiss)
            and isinstance(found.item, PartItem)
        }
        source_ids = frozenset(prefix.source_ids)
        return ArchivedSegment(state, source_ids, prefix.prefill_seconds, parts)

    def _lay_out(
        self,
        begun: Sequence[PendingSegment],
        prefixes: Sequence[ArchiveHit],
        known: SegmentHit | None,
    ) -> list[_Target]:
        """Say where everything is read to."""
        landings: list[_Target] = []
        filled = {(page.form, page.page) for page in _pages(known.segment)} if known else set()
        for pending, prefix in zip(begun, prefixes, strict=True):
            segment = pending.segment
            items = {form: prefix.pages(form) for form in PageForm}
            for page in _pages(segment):
                place = (page.form, page.page)
                if place not in filled and self._mover.page_bytes(page.form):
                    filled.add(place)
                    landing = self._mover.landing(*place)
                    found = items[page.form].get(page.index)
                    item = _checked(found, page, segment.end, landing.num_bytes)
                    landings.append((item, landing))
            landings += self._lay_out_state(segment, prefix)
            landings += _lay_out_parts(segment, prefix)
        return landings

    def _lay_out_state(self, segment: StoredSegment, prefix: ArchiveHit) -> list[_Target]:
        state = [tensor for tensor in segment.state if isinstance(tensor, torch.Tensor)]
        items = prefix.snapshots().get(segment.end, ())
        sizes = [item.item.num_bytes for item in items if isinstance(item.item, SnapshotItem)]
        if sizes != [tensor.nbytes for tensor in state]:
            raise _ItemLacking(f"the state at {segment.end} is not there")
        return list(zip(items, map(landing_in, state), strict=True))


def _lay_out_parts(segment: StoredSegment, prefix: ArchiveHit) -> Iterator[_Target]:
    for name, part in segment.parts.items():
        found = prefix.part(name)
        assert not isinstance(found, FileMiss)
        yield found, MemoryLanding(memoryview(part))


class _ItemLacking(Exception):
    """A file is sound, and lacks what a segment needs."""


def _checked(found: ArchivedItem | None, page: _Page, end: int, num_bytes: int) -> ArchivedItem:
    """Return a page's item if it holds all tokens of the page up to `end`."""
    item = found.item if found is not None else None
    if (
        found is None
        or not isinstance(item, PageItem)
        or item.num_bytes != num_bytes
        or item.num_tokens < page.num_tokens(end)
    ):
        raise _ItemLacking(f"the {page.form} page {page.index} is not there")
    return found


def _until(is_over: Callable[[], bool], targets: Iterable[_Target]) -> Iterator[_Target]:
    return takewhile(lambda _: not is_over(), targets)


def _pages(segment: StoredSegment) -> Iterator[_Page]:
    """Go through the pages of a segment and all before it."""
    num_packed = len(segment.packed_pages)
    for at, page in enumerate(segment.pages):
        yield _Page(PageForm.EXACT, at + num_packed if at else 0, page)
    for at, page in enumerate(segment.packed_pages, 1):
        yield _Page(PageForm.PACKED, at, page)


def _drawn(fetched: Future[tuple[memoryview, ...]]) -> Iterator[memoryview]:
    """Wait for copies when the first one is drawn."""
    yield from fetched.result()
