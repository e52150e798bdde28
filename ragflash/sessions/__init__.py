"""Files of stored segments: a document is read once and its keys and values outlive the process.

Nothing here imports torch: whoever has tensors hands over bytes, and gets bytes back.
"""

from ragflash.sessions.folder import SessionCounts, SessionFolder
from ragflash.sessions.hit import FileHit
from ragflash.sessions.identity import Identity
from ragflash.sessions.records import (
    NO_SOURCE,
    FileMiss,
    FileMissReason,
    PageItem,
    PartItem,
    RefusalReason,
    Refused,
    SegmentRecord,
    SessionInfo,
    SnapshotItem,
)
from ragflash.sessions.segment_file import StoredItem
from ragflash.sessions.writer import SessionLimits

__all__ = [
    "NO_SOURCE",
    "FileHit",
    "FileMiss",
    "FileMissReason",
    "Identity",
    "PageItem",
    "PartItem",
    "RefusalReason",
    "Refused",
    "SegmentRecord",
    "SessionCounts",
    "SessionFolder",
    "SessionInfo",
    "SessionLimits",
    "SnapshotItem",
    "StoredItem",
]
