"""The file operations that session files are made of.

They are few and apart, so that tests can stop, refuse, record or reorder every one of them.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

Buffer = bytes | bytearray | memoryview


class Disk:
    """Files for their owner only; every method raises `OSError` as the system does."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and those above it, lastingly."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        self.flush_folder(path.parent)

    def create(self, path: Path, num_bytes: int) -> int:
        """Create a file of zeros whose room is taken at once; return its descriptor."""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, descriptor: int, data: Buffer, offset: int) -> None:
        """Write all of `data`."""
        left = memoryview(data)
        while left:
            written = os.pwrite(descriptor, left, offset)
            left, offset = left[written:], offset + written

    def flush(self, descriptor: int) -> None:
        """Return when all that was written is lasting."""
        os.fdatasync(descriptor)

    def move(self, source: Path, target: Path) -> None:
        """Rename a file; it is lasting after `flush_folder` of both folders."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def flush_folder(self, path: Path) -> None:
        """Return when the names in a folder are lasting."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_mark(self, path: Path) -> None:
        """Create an empty file, if it is not there, lastingly."""
        path.touch(mode=0o600)
        self.flush_folder(path.parent)

    def open(self, path: Path) -> int:
        """Open a file to be read."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        """Read once; return how many bytes came, which may be too few."""
        return os.preadv(descriptor, into, offset)

    def touch(self, path: Path, seconds: float) -> None:
        """Set the time of last use; a file system that refuses keeps the former one."""
        with contextlib.suppress(OSError):
            os.utime(path, (seconds, seconds))

    def free_bytes(self, path: Path) -> int:
        """Room that is left for this user."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize
