"""Small derived files that can be rebuilt: written whole or not at all, checked when read."""

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from ragflash.errors import StorageError

_log = logging.getLogger(__name__)


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` put at `path`, or None where there is nothing or it is damaged."""
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    digest, _, payload = stored.partition(b"\n")
    if digest != _digest(payload):
        _log.warning("damaged cache file ignored path=%s", path)
        return None
    return payload


def write_checked(path: Path, payload: bytes) -> None:
    """Put `payload` at `path` with its digest; readers see the old file or the whole new one.

    Raises:
        StorageError: The folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_digest(payload) + b"\n" + payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode()
