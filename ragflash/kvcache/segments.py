"""The contract of stored prompt segments: runs of tokens whose keys and values can be used again.

A segment is reused only when its own tokens and those of every segment before it equal the
request's, in the same namespace and under the same identity (model, formats, template). Prompts
are thus cut where reuse may end.
"""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from ragflash.kvcache.allocator import PageForm
from ragflash.kvcache.table import KVTable, PageCopy

ROOT_KEY = b""

Parts = Mapping[str, bytes | bytearray]
"""What drafters keep, by name."""

NO_PARTS: Parts = MappingProxyType({})

T = TypeVar("T")


class MissReason(StrEnum):
    """Why no stored segment, or not a longer run of them, fits a prompt."""

    NONE_STORED = "none_stored"
    PREFIX_DIFFERS = "prefix_differs"
    EVICTED = "evicted"


def segment_key(
    parent_key: bytes, token_ids: Sequence[int], identity: str, namespace: str
) -> bytes:
    """Return the SHA-256 that names a segment: its tokens, all before them, and what they mean.

    Every part is preceded by its length, so that no two inputs are hashed alike.
    """
    digest = hashlib.sha256()
    tokens = array("q", token_ids).tobytes()
    for part in (parent_key, identity.encode(), namespace.encode(), tokens):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment whose keys and values are kept.

    Attributes:
        key: `segment_key` of it.
        parent: Key of the segment before it, `ROOT_KEY` at the start of a prompt.
        num_tokens: Its own tokens.
        end: Tokens from the start of the prompt to its end.
        pages: Exact pages of tokens `0 … end - 1`; a partial one belongs to the segment alone.
        packed_pages: Packed pages of them.
        state: Recurrent state after its last token, as the model's `snapshot` gave it.
        source_ids: Documents whose text it or a segment before it holds.
        prefill_seconds: How long computing it took.
        parts: What drafters keep of all tokens up to its end, by name; what is lacking costs
            drafts alone.
    """

    key: bytes
    parent: bytes
    num_tokens: int
    end: int
    pages: tuple[int, ...]
    packed_pages: tuple[int, ...]
    state: tuple[object, ...]
    source_ids: frozenset[str]
    prefill_seconds: float = 0.0
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArchivedSegment:
    """What is known of a segment that is read back from an archive.

    Attributes:
        state: Where the recurrent state after its last token will be.
        source_ids: Documents whose text it or a segment before it holds.
        prefill_seconds: How long computing it took.
        parts: See `StoredSegment`.
    """

    state: tuple[object, ...]
    source_ids: frozenset[str]
    prefill_seconds: float
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SegmentHit:
    """The longest stored run of whole segments that a prompt starts with.

    Attributes:
        segment: The last of the run.
        num_segments: Segments in the run, at least 1.
        reason: Why the run is not longer; `None` when it is the whole prompt.
    """

    segment: StoredSegment
    num_segments: int
    reason: MissReason | None


@dataclass(frozen=True, slots=True)
class SegmentMiss:
    """Not even the first segment is stored."""

    reason: MissReason


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """A stored segment in use by one sequence; it is not evicted until `SegmentStore.close`.

    Attributes:
        segment: What was opened.
        table: The sequence's own table of `segment.end` committed tokens; the sequence releases it.
        copies: To be carried out before `table` is read or written.
        state: For the model's `restore`.
    """

    segment: StoredSegment
    table: KVTable
    copies: tuple[PageCopy, ...]
    state: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PendingSegment:
    """A segment that is being stored and that no lookup finds yet.

    Attributes:
        segment: What it will be.
        copies: To be carried out before `SegmentStore.commit`.
    """

    segment: StoredSegment
    copies: tuple[PageCopy, ...]


class SegmentStore(Protocol):
    """Keeps segments. Called from the worker thread only, but for the two numbers."""

    def __len__(self) -> int:
        """Return how many segments are stored."""

    @property
    def num_evicted(self) -> int:
        """Segments that were dropped so far to make room."""

    def stored(self) -> tuple[StoredSegment, ...]:
        """Return all segments that lookups find."""

    def lookup(
        self, segments: Sequence[tuple[int, ...]], *, identity: str, namespace: str
    ) -> SegmentHit | SegmentMiss:
        """Find the longest stored run of whole segments at the start of a prompt, token by token.

        A hit may be the whole prompt; the caller leaves out what it must compute itself.
        """

    def open(self, hit: SegmentHit) -> OpenSegment:
        """Give a new sequence the tokens of a hit of this step.

        Evicts other segments when copies need pages; raises `PagesExhausted` when that does
        not help, and `ValueError` for a segment that is no longer stored.
        """

    def close(self, opened: OpenSegment) -> None:
        """End the use of an opened segment, once; it may have been dropped meanwhile."""

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
        """Start storing the last of `segments`, a sequence's committed tokens up to its end.

        Args:
            segments: From the start of the prompt to the segment's end.
            identity: Digest of all that keys and values depend on but tokens.
            namespace: Who may use it.
            table: The sequence's table, which can be forked at the segment's end.
            state: The model's snapshot at the segment's end, not later.
            source_ids: Documents of the segment itself; those before it are added.
            prefill_seconds: How long computing it took.
            parts: See `StoredSegment`.

        Returns:
            `None` when it is stored already or a segment before it is not stored.

        Raises:
            PagesExhausted: No page is left for a copy, even after eviction.
        """

    def begin_archived(
        self,
        segments: Sequence[tuple[int, ...]],
        found: Sequence[ArchivedSegment],
        *,
        identity: str,
        namespace: str,
    ) -> tuple[PendingSegment, ...]:
        """Start storing the last `len(found)` of `segments`, which are not, after all others are.

        Their pages, but for those of the segment before, and states are to be filled before
        `commit`, which is called for all in order, as is `abandon` if they cannot be.

        Raises:
            PagesExhausted: Pages are lacking, even after eviction; nothing was begun.
            ValueError: A segment before them is not stored.
        """

    def commit(self, pending: PendingSegment) -> None:
        """Make a segment visible, after its copies were carried out."""

    def abandon(self, pending: PendingSegment) -> None:
        """Give back what `begin` took."""

    def hold(self, segment: StoredSegment, until: "Future[Any]") -> None:
        """Keep a stored segment's pages as they are until something is done that reads them.

        That outlasts eviction and dropping. Whoever lacks pages that are held waits for it.
        """

    def evict(self, num_pages: int, form: PageForm = PageForm.EXACT) -> int:
        """Drop segments, the longest unused first, until `num_pages` more of a form are free.

        Segments in use, those before others and those without such pages stay. Returns how many
        pages of the form became free, which is fewer when nothing more can go.
        """

    def make_room(self, take: Callable[[], T]) -> T:
        """Return what `take` returns; evict, then wait for what is held, as long as it lacks pages.

        Raises `PagesExhausted` when nothing more can go.
        """

    def drop_source(self, source_id: str) -> int:
        """Forget every segment that holds or follows text of a document; return how many."""

    def drop_all(self) -> int:
        """Forget every segment; return how many."""
