"""What was found for a prompt: open files, one for each segment from its start."""

from dataclasses import dataclass, replace
from hashlib import sha256
from types import TracebackType
from typing import Self

from ragflash.kvcache.allocator import PageForm
from ragflash.kvcache.archive import (
    FileMiss,
    FileMissReason,
    PageItem,
    PartItem,
    SnapshotItem,
)
from ragflash.kvcache.identity import Identity
from ragflash.sessions.segment_file import SegmentFile, StoredItem


@dataclass(frozen=True, slots=True, eq=False)
class FileHit:
    """The longest stored run of whole segments that a prompt starts with; to be closed after use.

    It can be read to its end whatever is evicted or deleted meanwhile.

    Attributes:
        files: One a segment, at least one, the start of the prompt first.
        identity: That they were found under.
        miss: Why the run is not longer; `None` when it is the whole prompt.
    """

    files: tuple[SegmentFile, ...]
    identity: Identity
    miss: FileMiss | None

    @property
    def num_segments(self) -> int:
        """Segments in the run."""
        return len(self.files)

    @property
    def end(self) -> int:
        """Tokens from the start of the prompt to the end of the run."""
        return self.files[-1].header.start + self.files[-1].header.num_tokens

    @property
    def source_ids(self) -> tuple[str, ...]:
        """Documents whose text the run holds."""
        return self.files[-1].tables.source_ids

    @property
    def prefill_seconds(self) -> float:
        """How long computing the last segment took."""
        return self.files[-1].header.prefill_seconds

    def prefix(self, num_segments: int) -> "FileHit":
        """Return the run of the first segments; the files are still closed with this hit."""
        return replace(self, files=self.files[:num_segments], miss=None)

    def pages(self, form: PageForm) -> dict[int, StoredItem]:
        """Return the pages of a form by number; of several with one number the last is right."""
        found: dict[int, StoredItem] = {}
        for stored in self._items():
            if isinstance(stored.item, PageItem) and stored.item.form is form:
                found[stored.item.index] = stored
        return dict(sorted(found.items()))

    def snapshots(self) -> dict[int, tuple[StoredItem, ...]]:
        """Return the arrays of each snapshot, in order, by the position that they are of."""
        found: dict[int, dict[int, StoredItem]] = {}
        for stored in self._items():
            if isinstance(stored.item, SnapshotItem):
                found.setdefault(stored.item.position, {})[stored.item.index] = stored
        return {
            position: tuple(stored for _, stored in sorted(arrays.items()))
            for position, arrays in sorted(found.items())
        }

    def part(self, name: str) -> StoredItem | FileMiss:
        """Return a named part of the last segment, or why it is of no use."""
        for extent in self.files[-1].tables.extents:
            if isinstance(extent.item, PartItem) and extent.item.name == name:
                wanted = sha256(self.identity.of_part(name).encode()).digest()
                if extent.part_identity != wanted:
                    return FileMiss(FileMissReason.IDENTITY_DIFFERS, name)
                return StoredItem(self.files[-1], extent)
        return FileMiss(FileMissReason.NONE_STORED)

    def close(self) -> None:
        """Close the files; nothing may be reading them."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _items(self) -> list[StoredItem]:
        return [StoredItem(file, extent) for file in self.files for extent in file.tables.extents]
