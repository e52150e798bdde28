"""The files of remembered prompts in the data folder, which outlive the engine."""

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ragflash.errors import StorageError
from ragflash.settings import Settings

if TYPE_CHECKING:
    from ragflash.sessions import FolderArchive, SessionFolder

_log = logging.getLogger(__name__)

_GIB = 1 << 30

_changing = threading.Lock()  # of who has the folder open in this process


class Slot(Protocol):
    """Where others find the folder while it is open."""

    sessions: "SessionFolder | None"


@contextmanager
def session_archive(settings: Settings, slot: Slot) -> "Iterator[FolderArchive | None]":
    """Open the files for an engine that is closed before they are; `None` where none are kept."""
    from ragflash.sessions import FolderArchive  # noqa: PLC0415  (with the engine, not before)

    if not settings.sessions_gb:
        yield None
        return
    try:
        with _changing:
            folder = slot.sessions = open_sessions(settings)
    except StorageError as error:
        _log.warning("sessions are not kept", extra={"reason": str(error)})
        yield None
        return
    archive = FolderArchive(folder)
    try:
        yield archive
    finally:
        archive.close()
        with _changing:
            slot.sessions = None
            folder.close()


def forget_sessions(settings: Settings, slot: Slot, source_id: str) -> None:
    """Remove all files with text of a document, whether or not an engine has them open.

    Raises:
        DataFolderLocked: Another process has them.
        StorageError: The disk refused; what is left can be removed by another call.
    """
    with _changing:
        if slot.sessions is not None:
            slot.sessions.delete_source(source_id)
        elif _path(settings).is_dir():
            folder = open_sessions(settings)
            try:
                folder.delete_source(source_id)
            finally:
                folder.close()


def open_sessions(settings: Settings, *, read_only: bool = False) -> "SessionFolder":
    """Open the files without an engine; to be closed.

    Raises:
        StorageError: The folder cannot be made or listed.
    """
    from ragflash.sessions import SessionFolder, SessionLimits  # noqa: PLC0415  (as above)

    limits = SessionLimits(
        quota_bytes=int(settings.sessions_gb * _GIB),
        collection_quota_bytes=_limit_bytes(settings.sessions_collection_gb),
        daily_write_bytes=_limit_bytes(settings.sessions_daily_write_gb),
    )
    return SessionFolder.open(_path(settings), limits, read_only=read_only)


def _limit_bytes(gib: float | None) -> float:
    return gib * _GIB if gib else math.inf


def _path(settings: Settings) -> Path:
    return settings.data_dir / "sessions"
