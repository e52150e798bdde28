"""Whatever changes which files there are, one change at a time."""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from ragflash.kvcache.archive import FileMissReason
from ragflash.sessions.disk import Disk
from ragflash.sessions.eviction import Entry
from ragflash.sessions.format import SegmentUnusable
from ragflash.sessions.inventory import FILE_SUFFIX, PIN_SUFFIX, Inventory, place_of
from ragflash.sessions.part_file import PART_SUFFIX
from ragflash.sessions.segment_file import SegmentFile

_QUARANTINE = "quarantine"

_log = logging.getLogger(__name__)


class Changes:
    """Removes files, sets them aside, and makes room.

    Methods raise `OSError` as the system does; what was done by then is noted in the inventory.

    Attributes:
        lock: Held by whoever changes which files there are; it may be taken again by its holder.
        num_set_aside: Damaged files found since the start.
    """

    def __init__(self, disk: Disk, folder: Path, inventory: Inventory) -> None:
        self.lock = threading.RLock()
        self.num_set_aside = 0
        self._disk = disk
        self._folder = folder
        self._quarantine = folder / _QUARANTINE
        self._inventory = inventory
        self._unflushed: set[Path] = set()  # folders with names that changed

    def tidy(self, being_written: Collection[Path]) -> None:
        """Remove what a killed writer left, and look at all files again.

        Damaged files are set aside; those of other versions of the format are removed, since
        nothing can find them. What the disk refuses is left for the next time.
        """
        with self.lock:
            for path in self._folder.glob(f"*/*{PART_SUFFIX}"):
                if path.with_suffix("") not in being_written:
                    self._attempt(self._disk.remove, path)
            for path, error in self._inventory.recount():
                if error.reason is FileMissReason.IDENTITY_DIFFERS:
                    self._attempt(self._disk.remove, path)
                else:
                    self._attempt(self._set_aside, path, error.detail)
            for path in self._folder.glob(f"*/*{PIN_SUFFIX}"):
                if not path.with_suffix(FILE_SUFFIX).exists():
                    self._attempt(self._disk.remove, path)

    def _attempt(self, step: Callable[..., None], *arguments: object) -> None:
        try:
            step(*arguments)
        except OSError as error:
            _log.warning("the folder of sessions is not tidy", extra={"reason": str(error)})

    def remove(self, entries: Iterable[Entry], *, evicted: bool = False) -> None:
        """Remove files for good, and make lasting what an earlier removal could not."""
        removed: list[bytes] = []
        with self.lock:
            try:
                for entry in entries:
                    path = place_of(self._folder, entry.row.namespace, entry.key)
                    self._unflushed.add(path.parent)
                    self._disk.remove(path)
                    removed.append(entry.key)
                    self._disk.remove(path.with_suffix(PIN_SUFFIX))
                self._flush_folders()
            finally:
                self._inventory.remove(removed, evicted=evicted)

    def forget_missing(self, path: Path, key: bytes) -> None:
        """Forget a file that somebody else has removed."""
        with self.lock:
            if not path.exists():
                self._inventory.remove([key])

    def set_aside_unopened(self, path: Path) -> None:
        """Set a file aside that could not be opened, unless it was replaced meanwhile."""
        with self.lock:
            try:
                SegmentFile.open(self._disk, path).close()
            except SegmentUnusable as error:
                self._set_aside(path, error.detail)

    def set_aside(self, file: SegmentFile, detail: str) -> None:
        """Set an open file aside, unless it was removed or replaced meanwhile."""
        with self.lock:
            if file.is_at(file.path):
                self._set_aside(file.path, detail)

    def _set_aside(self, path: Path, detail: str) -> None:
        _log.warning("damaged session file set aside", extra={"file": path.name, "reason": detail})
        self._disk.make_folder(self._quarantine)
        self._disk.move(path, self._quarantine / f"{path.stem}.{uuid4().hex[:8]}")
        self._unflushed |= {path.parent, self._quarantine}
        self.num_set_aside += 1
        with contextlib.suppress(ValueError):
            self._inventory.remove([bytes.fromhex(path.stem)])
        self._disk.remove(path.with_suffix(PIN_SUFFIX))
        self._flush_folders()

    def _flush_folders(self) -> None:
        for folder in sorted(self._unflushed):
            self._disk.flush_folder(folder)
            self._unflushed.discard(folder)

    def _files_aside(self) -> list[Path]:
        return sorted(self._quarantine.iterdir()) if self._quarantine.is_dir() else []

    def drop_set_aside(self) -> None:
        """Remove the files that were set aside."""
        with self.lock:
            for path in self._files_aside():
                self._unflushed.add(self._quarantine)
                self._disk.remove(path)
            self._flush_folders()

    def size_bytes(self) -> int:
        """Return what all files take, those set aside included."""
        with self.lock:
            return self._aside_bytes() + self._inventory.size_bytes

    def make_room(self, num_bytes: int, kept: Collection[bytes], first: str | None = None) -> bool:
        """Make files smaller by `num_bytes`; return whether that can be, and otherwise do nothing.

        What was set aside goes first, then what is worth least, from the namespace `first` before
        it is taken from others.
        """
        if num_bytes <= 0:
            return True
        with self.lock:
            aside_bytes = self._aside_bytes()
            victims: Sequence[Entry] | None = ()
            if num_bytes > aside_bytes:
                victims = self._inventory.plan_eviction(num_bytes - aside_bytes, kept, first)
            if victims is None:
                return False
            self.drop_set_aside()
            self.remove(victims, evicted=True)
        return True

    def make_room_inside(self, namespace: str, num_bytes: float, kept: Collection[bytes]) -> bool:
        """Make the files of a namespace smaller, as `make_room` does for all together."""
        if num_bytes <= 0:
            return True
        with self.lock:
            victims = self._inventory.plan_eviction_inside(namespace, num_bytes, kept)
            if victims is None:
                return False
            self.remove(victims, evicted=True)
        return True

    def _aside_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files_aside())
