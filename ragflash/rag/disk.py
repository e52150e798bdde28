"""The file operations that a library is built of; what has returned survives a power failure.

They are few and apart, so that tests can stop or refuse every one of them.
"""

import mmap
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


class Disk:
    """Plain files and folders; every method raises `OSError` as the system does."""

    def make_folder(self, path: Path) -> None:
        """Create a folder, for its owner only, and those above it."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        _flush_folder(path.parent)

    def write(self, path: Path, blocks: Iterable[bytes]) -> None:
        """Write a file that is not there yet; after a failure it is still not there."""
        try:
            with path.open("xb") as file:
                for block in blocks:
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def move(self, source: Path, place: Path) -> None:
        """Rename a file over whatever has that name."""
        source.replace(place)
        _flush_folder(place.parent)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and all in it, if it is there."""
        if path.exists():
            shutil.rmtree(path)

    def read(self, path: Path) -> bytes:
        """Everything in a file."""
        return path.read_bytes()

    def map(self, path: Path) -> mmap.mmap:
        """Everything in a file, read as it is wanted; raises `ValueError` when it is empty."""
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
