"""One writer a folder."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Self


class WriterLock:
    """The right to write into a folder while the process lives; the kernel takes it back then."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path) -> Self | None:
        """Take the lock of this file; return `None` where a living process has it.

        Nor has anybody the right on a file system that takes no writes.

        Raises:
            OSError: The file cannot be made for another reason.
        """
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in {errno.EROFS, errno.EACCES}:
                return None
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        """Give it up."""
        os.close(self._descriptor)
