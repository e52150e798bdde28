"""Files of stored segments: a document is read once and its keys and values outlive the process.

Nothing here imports torch: whoever has tensors hands over bytes, and gets bytes back.
"""

from ragflash.kvcache.archive import FileMiss, FileMissReason, PageItem, PartItem, SnapshotItem
from ragflash.kvcache.identity import Identity
from ragflash.sessions.archive import ArchiveCounts, FolderArchive
from ragflash.sessions.folder import SessionFolder
from ragflash.sessions.hit import FileHit
from ragflash.sessions.records import (
    NO_SOURCE,
    RefusalReason,
    Refused,
    SegmentRecord,
    SessionCounts,
    SessionInfo,
)
from ragflash.sessions.segment_file import StoredItem
from ragflash.sessions.writer import SessionLimits

__all__ = [
    "NO_SOURCE",
    "ArchiveCounts",
    "FileHit",
    "FileMiss",
    "FileMissReason",
    "FolderArchive",
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
