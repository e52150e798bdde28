"""What a disk may hold after the power failed, by what was written and flushed until then.

Nothing is believed but what POSIX promises: bytes are lasting after a flush of their file, names
after a flush of their folder. Whatever came after may be there or not, in any order and in parts.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ragflash.sessions.disk import Disk

SECTOR_BYTES = 512


@dataclass(eq=False)
class Inode:
    """A file's bytes.

    Attributes:
        lasting: Bytes after the last flush.
        pending: Writes since then, with their offsets.
    """

    lasting: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def flush(self) -> None:
        self.lasting = self.after(self.pending)
        self.pending = []

    def after(self, writes: list[tuple[int, bytes]]) -> bytearray:
        data = bytearray(self.lasting)
        for offset, piece in writes:
            data.extend(bytes(max(0, offset + len(piece) - len(data))))
            data[offset : offset + len(piece)] = piece
        return data

    def torn(self, chance: random.Random) -> bytearray:
        """Return bytes after some sectors of some pending writes, in any order."""
        sectors = [
            (offset + at, piece[at : at + SECTOR_BYTES])
            for offset, piece in self.pending
            for at in range(0, len(piece), SECTOR_BYTES)
        ]
        share = chance.random()
        kept = [sector for sector in sectors if chance.random() < share]
        return self.after(chance.sample(kept, len(kept)))


Names = dict[Path, Inode | None]  # `None` is a folder


@dataclass(frozen=True)
class Renaming:
    """A name that goes and one that comes, either of them `None`."""

    old: Path | None
    new: Path | None
    inode: Inode | None

    @property
    def folder(self) -> Path:
        path = self.new or self.old
        assert path is not None
        return path.parent

    def apply(self, names: Names) -> None:
        if self.old is not None:
            names.pop(self.old, None)
        if self.new is not None:
            names[self.new] = self.inode


class RecordingDisk(Disk):
    """A disk that works, and knows what would be left of it without power.

    Args:
        lies: Whether files are flushed in name only.

    Attributes:
        after_each: Called after every operation that changes something.
    """

    def __init__(self, *, lies: bool = False) -> None:
        self.lies = lies
        self.after_each = lambda: None
        self.lasting: Names = {}
        self.pending: list[Renaming] = []
        self._names: Names = {}
        self._open: dict[int, Inode] = {}

    def _change(self, renaming: Renaming) -> None:
        renaming.apply(self._names)
        self.pending.append(renaming)
        self.after_each()

    def make_folder(self, path):
        if not path.is_dir():
            self._change(Renaming(None, path, None))
        super().make_folder(path)

    def create(self, path, num_bytes):
        descriptor = super().create(path, num_bytes)
        inode = self._open[descriptor] = Inode(pending=[(0, bytes(num_bytes))])
        self._change(Renaming(None, path, inode))
        return descriptor

    def write(self, descriptor, data, offset):
        super().write(descriptor, data, offset)
        self._open[descriptor].pending.append((offset, bytes(data)))
        self.after_each()

    def flush(self, descriptor):
        if not self.lies:
            self._open[descriptor].flush()
        self.after_each()

    def move(self, source, target):
        super().move(source, target)
        self._change(Renaming(source, target, self._names[source]))

    def remove(self, path):
        super().remove(path)
        if path in self._names:
            self._change(Renaming(path, None, None))

    def flush_folder(self, path):
        for renaming in self.pending:
            if renaming.folder == path:
                renaming.apply(self.lasting)
        self.pending = [renaming for renaming in self.pending if renaming.folder != path]
        self.after_each()

    def make_mark(self, path):
        self._change(Renaming(None, path, Inode()))
        super().make_mark(path)

    def wrecks(self, chance: random.Random) -> Iterator[dict[Path, bytes | None]]:
        """Yield what may be left now: bytes by path, `None` for a folder.

        For every choice of the names that are not lasting yet: with none of the bytes that are
        not lasting, with all of them, with some, and with all but one write.
        """
        count = len(self.pending)
        assert count <= 4, "too many names wait for a flush"
        for chosen in itertools.product((False, True), repeat=count):
            names = dict(self.lasting)
            kept = [r for r, is_kept in zip(self.pending, chosen, strict=True) if is_kept]
            for renaming in chance.sample(kept, len(kept)):
                renaming.apply(names)
            has_pending = any(inode and inode.pending for inode in names.values())
            for torn in ("none", "all", "some", "but one") if has_pending else ("all",):
                yield {
                    path: None if inode is None else _bytes_of(inode, torn, chance)
                    for path, inode in names.items()
                    if all(parent in names for parent in path.parents if parent in self._names)
                }


def _bytes_of(inode: Inode, torn: str, chance: random.Random) -> bytes:
    if torn == "some":
        return bytes(inode.torn(chance))
    if torn == "but one" and len(inode.pending) > 1:  # the first write is the file's length
        lost = chance.randrange(1, len(inode.pending))
        return bytes(inode.after(inode.pending[:lost] + inode.pending[lost + 1 :]))
    return bytes(inode.after([] if torn == "none" else inode.pending))


def build(wreck: dict[Path, bytes | None], root: Path, copy: Path) -> None:
    """Make files and folders below `copy` as they are left below `root`."""
    copy.mkdir(parents=True)
    for path, data in sorted(wreck.items()):
        if not path.is_relative_to(root):
            continue
        target = copy / path.relative_to(root)
        if data is None:
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(data)
