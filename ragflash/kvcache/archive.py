"""The contract of a slower place for stored segments, such as files, that outlives the process.

Torch-free: pages and snapshots go in and come out as bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ragflash.kvcache.allocator import PageForm
from ragflash.kvcache.identity import Identity

MAX_PART_NAME = 16
PIECE_BYTES = 4 << 20
"""Most bytes that are read at once; a checksum covers no more, so that each piece has its own."""


class FileMissReason(StrEnum):
    """Why no file, or not a longer run of files, is used for a prompt."""

    NONE_STORED = "none_stored"
    PREFIX_DIFFERS = "prefix_differs"
    EVICTED = "evicted"
    IDENTITY_DIFFERS = "identity_differs"
    DAMAGED = "damaged"
    IO_ERROR = "io_error"


@dataclass(frozen=True, slots=True)
class FileMiss:
    """Nothing is used; `field` names what differs in the identity."""

    reason: FileMissReason
    field: str | None = None
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}:{self.field}" if self.field else str(self.reason)


@dataclass(frozen=True, slots=True)
class PageItem:
    """One page of all layers.

    Attributes:
        form: As computed, or packed.
        index: Its number in the sequence: token `p` is in page `p // page_tokens`.
        num_tokens: Places that are filled, from the page's first; those before the segment too.
        num_bytes: Of the whole page.
    """

    form: PageForm
    index: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotItem:
    """One array of the recurrent state after `position` tokens.

    Attributes:
        position: Tokens from the start of the prompt.
        index: Number of the array in what the model's `snapshot` gives.
        num_bytes: Of the array.
    """

    position: int
    index: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PartItem:
    """Something that is of use beside pages and snapshots, and can be missing.

    Attributes:
        name: `drafter`, `mtp`; ASCII, `MAX_PART_NAME` characters at most.
        num_bytes: Of all of it.
    """

    name: str
    num_bytes: int

    def __post_init__(self) -> None:
        if not self.name.isascii() or not 0 < len(self.name) <= MAX_PART_NAME:
            raise ValueError(f"a part named {self.name!r}")


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCopy:
    """Bytes of a stored segment, beside those of the segments before it.

    Attributes:
        segments: Tokens of the prompt up to its end, cut into segments; it is the last.
        identity: What its bytes depend on.
        namespace: Who may use it.
        source_ids: Documents whose text it or a segment before it holds.
        items: In the order of `buffers`.
        buffers: One an item, drawn once by the thread that writes them. Drawing waits until all are
            copied and raises what copying raised; nobody writes to them any more.
        prefill_seconds: How long computing it took.
    """

    segments: tuple[tuple[int, ...], ...]
    identity: Identity
    namespace: str
    source_ids: frozenset[str]
    items: tuple[PageItem | SnapshotItem | PartItem, ...]
    buffers: Iterable[memoryview]
    prefill_seconds: float


class ArchivedItem(Protocol):
    """A page, an array of a snapshot or another part, where it lies."""

    @property
    def item(self) -> object:
        """What it is: a `PageItem`, `SnapshotItem`, `PartItem`, or what nobody here knows."""


class ArchiveHit(Protocol):
    """The longest archived run of whole segments that a prompt starts with."""

    @property
    def num_segments(self) -> int:
        """Segments in the run, at least 1."""

    @property
    def miss(self) -> FileMiss | None:
        """Why the run is not longer; `None` when it is the whole prompt."""

    @property
    def source_ids(self) -> tuple[str, ...]:
        """Documents whose text the run holds."""

    @property
    def prefill_seconds(self) -> float:
        """How long computing the last segment took."""

    def prefix(self, num_segments: int) -> "ArchiveHit":
        """Return the run of the first segments; it is of use until this hit is closed."""

    def pages(self, form: PageForm) -> Mapping[int, ArchivedItem]:
        """Return pages of a form by number, each as it was at the end of the run or before."""

    def snapshots(self) -> Mapping[int, tuple[ArchivedItem, ...]]:
        """Return the arrays of each snapshot, in order, by the position that they are of."""

    def part(self, name: str) -> ArchivedItem | FileMiss:
        """Return a named part of the last segment, or why it is of no use."""

    def close(self) -> None:
        """Give it up; nothing may be reading it."""


class Landing(Protocol):
    """Where the bytes of an item go to, piece by piece and in any order; called from any thread."""

    @property
    def num_bytes(self) -> int:
        """Of the whole item."""

    def piece(self, at: slice) -> AbstractContextManager[memoryview]:
        """Lend memory for at most `PIECE_BYTES` of the item.

        What is in it counts when the context ends without an error, and else is forgotten. It may
        wait for memory that others have, so a thread has one piece at a time.
        """


@dataclass(frozen=True, slots=True)
class MemoryLanding(Landing):
    """Bytes go to their place at once."""

    memory: memoryview

    @property
    def num_bytes(self) -> int:
        """See `Landing`."""
        return self.memory.nbytes

    def piece(self, at: slice) -> AbstractContextManager[memoryview]:
        """See `Landing`; it never waits."""
        return nullcontext(self.memory.cast("B")[at])


class SegmentArchive(Protocol):
    """Finds, reads and keeps segments; called from the worker thread, and raises for no fault."""

    def find(
        self, segments: Sequence[tuple[int, ...]], *, identity: Identity, namespace: str
    ) -> ArchiveHit | FileMiss:
        """Find the longest archived run of whole segments at the start of a prompt."""

    def read(self, targets: Iterable[tuple[ArchivedItem, Landing]]) -> FileMiss | None:
        """Have items land, each verified, and return when nobody writes to memory any more.

        Targets are drawn one by one, from any thread. After a miss anything may have landed.
        """

    def missing(
        self, segments: Sequence[tuple[int, ...]], *, identity: Identity, namespace: str
    ) -> tuple[int, ...]:
        """Return the numbers of the segments that are worth saving, ascending: not there yet."""

    def save(self, num_bytes: int, copy: Callable[[], SegmentCopy]) -> bool:
        """Take a segment to be written in the background; return whether there is room for it.

        Args:
            num_bytes: Of all its items.
            copy: Makes it; called at once, or never.
        """
