"""What goes into the folder of session files, and what comes out."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ragflash.kvcache.archive import PageItem, PartItem, SnapshotItem
from ragflash.kvcache.identity import Identity
from ragflash.kvcache.segments import ROOT_KEY, segment_key

NO_SOURCE = 0xFFFF_FFFF
"""Origin of a token that copies no document."""

ORIGIN_COLUMNS = 4


class RefusalReason(StrEnum):
    """Why a segment is not written."""

    ALREADY_STORED = "already_stored"
    PARENT_NOT_STORED = "parent_not_stored"
    NOT_WORTH_IT = "not_worth_it"
    QUOTA = "quota"
    COLLECTION_QUOTA = "collection_quota"
    WRITE_BUDGET = "write_budget"
    DISK_FULL = "disk_full"
    READ_ONLY = "read_only"
    SOURCE_DELETED = "source_deleted"
    INVALID = "invalid"
    IO_ERROR = "io_error"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Refused:
    """A segment was not written, and nothing of it is left."""

    reason: RefusalReason
    detail: str = ""


Item = PageItem | SnapshotItem | PartItem


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Names of the last segment of a prompt.

    Attributes:
        key: `segment_key` of it.
        parent: Key of the segment before it.
        lineage: Its key if the identity did not count; two files that share it differ in identity.
    """

    key: bytes
    parent: bytes
    lineage: bytes


def prefix_keys(
    segments: Sequence[tuple[int, ...]], identity: Identity, namespace: str
) -> tuple[PrefixKeys, ...]:
    """Name every segment of a prompt, first to last."""
    found: list[PrefixKeys] = []
    parent = lineage = ROOT_KEY
    digest = identity.digest
    for tokens in segments:
        key = segment_key(parent, tokens, digest, namespace)
        lineage = segment_key(lineage, tokens, "", namespace)
        found.append(PrefixKeys(key, parent, lineage))
        parent = key
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What is to be stored of a segment, but for the bytes of its items.

    Attributes:
        segments: Tokens of the prompt up to the segment's end, cut into segments; it is the last.
        identity: What its bytes depend on.
        namespace: Who may use it; files of one namespace lie in one folder.
        source_ids: Documents of the segment itself; those before it are added.
        items: In the order in which their bytes come.
        prefill_seconds: How long computing it took.
        origins: Of type `I`, empty or four numbers a token, column after column: number of the
            document in `source_ids` or `NO_SOURCE`, first character and end in its text, and
            characters of the token before the first.
    """

    segments: tuple[tuple[int, ...], ...]
    identity: Identity
    namespace: str
    source_ids: tuple[str, ...]
    items: tuple[Item, ...]
    prefill_seconds: float
    origins: "array[int]" = field(default_factory=lambda: array("I"))

    def __post_init__(self) -> None:
        if not all(self.segments) or not self.segments:
            raise ValueError("a segment without tokens")
        if len(self.origins) not in {0, ORIGIN_COLUMNS * len(self.segments[-1])}:
            raise ValueError(f"{len(self.origins)} origins of {len(self.segments[-1])} tokens")
        if not 0 <= self.prefill_seconds < math.inf:
            raise ValueError(f"prefill_seconds = {self.prefill_seconds}")
        if any(item.num_bytes < 1 for item in self.items):
            raise ValueError("an item without bytes")

    @property
    def start(self) -> int:
        """Tokens before the segment."""
        return sum(map(len, self.segments[:-1]))


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One stored segment, as lists show it.

    Attributes:
        id: Its key in hexadecimal digits.
        namespace: Who may use it.
        source_ids: Documents whose text it or a segment before it holds.
        num_tokens: Its own tokens.
        end: Tokens from the start of the prompt to its end.
        size_bytes: Of its file.
        prefill_seconds: What one use saves.
        created_s: When it was written, in Unix time.
        last_used_s: When it was last found, in Unix time.
        pinned: Whether eviction leaves it alone.
    """

    id: str
    namespace: str
    source_ids: tuple[str, ...]
    num_tokens: int
    end: int
    size_bytes: int
    prefill_seconds: float
    created_s: float
    last_used_s: float
    pinned: bool


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """What the folder holds, and what it may hold; a limit that is not set is infinite.

    Attributes:
        num_segments: Files that can be found.
        size_bytes: What all files take, those set aside included.
        largest_collection_bytes: What files of one namespace take at most.
        num_set_aside: Damaged files found since the start.
        written_today_bytes: Written, or set out to be, today (UTC).
        quota_bytes: Of `size_bytes`.
        collection_quota_bytes: Of `largest_collection_bytes`.
        daily_write_bytes: Of `written_today_bytes`.
    """

    num_segments: int
    size_bytes: int
    largest_collection_bytes: int
    num_set_aside: int
    written_today_bytes: int
    quota_bytes: int
    collection_quota_bytes: float
    daily_write_bytes: float
