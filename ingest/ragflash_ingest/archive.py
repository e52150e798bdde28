"""ZIP containers of office files and books, inflated under a budget before anyone else sees them.

A container's directory can lie about sizes, and two readers can see two different archives in the
same bytes. So the members that hold text are inflated here, bytes counted as they come out, and
libraries get a fresh archive of exactly those bytes. Pictures, sounds, fonts and embedded files are
never inflated; an archive inside the archive is one of them.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

from ragflash_ingest.document import FailureReason, ParseError

MAX_ENTRIES = 10_000
MAX_BYTES = 256 << 20
MAX_RATIO = 200
"""Inflated bytes for one byte of the file; deflate reaches 1,032, office files rarely 50."""
FREE_BYTES = 16 << 20
"""What any file may inflate to: small files of much repetition are no harm."""

_BLOCK_BYTES = 64 * 1024
_DIRECTORY_ENTRY = b"PK\x01\x02"
_ENCRYPTED = 0x1
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, OSError)
# Kinds of members that the text of an office file or a book may stand in.
_TEXT_SUFFIXES = frozenset({"", ".xml", ".rels", ".opf", ".html", ".htm", ".xhtml", ".bin"})
_EMBEDDED_FOLDERS = frozenset({"embeddings", "activeX"})


@dataclass(frozen=True, slots=True)
class Archive:
    """Members of a container, in its order.

    Attributes:
        texts: Inflated members that may hold text.
        others: Names of members that were not inflated.
    """

    texts: Mapping[str, bytes]
    others: tuple[str, ...]

    def embedded(self) -> tuple[str, ...]:
        """Names of files that were put into the file whole, archives among them."""
        return tuple(name for name in self.others if "embeddings" in PurePosixPath(name).parts[:-1])

    def repack(self, change: Callable[[str, bytes], bytes] = lambda _, data: data) -> io.BytesIO:
        """Archive of the same members, uncompressed; those without text are empty.

        Args:
            change: Gives the bytes of a member to write instead.
        """
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for name, data in self.texts.items():
                archive.writestr(name, change(name, data))
            for name in self.others:
                archive.writestr(name, b"")
        packed.seek(0)
        return packed


def list_names(data: bytes) -> list[str]:
    """Names of the members; nothing is inflated.

    Raises:
        ParseError: `corrupt`, or `too_large`.
    """
    with _open(data) as archive:
        return archive.namelist()


def unpack(data: bytes) -> Archive:
    """Inflate what may hold text.

    Raises:
        ParseError: `encrypted`, `corrupt`, or `too_large` when the budget of bytes or entries is
            spent.
    """
    budget = _Budget(min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * len(data))))
    texts: dict[str, bytes] = {}
    others: dict[str, None] = {}
    with _open(data) as archive:
        for entry in archive.infolist():
            name = entry.filename
            if entry.is_dir():
                continue
            if entry.flag_bits & _ENCRYPTED:
                raise ParseError(FailureReason.ENCRYPTED, "the file is protected by a password")
            if name in texts or name in others:
                raise ParseError(FailureReason.CORRUPT, f"the file holds {name} twice")
            if _may_hold_text(name):
                texts[name] = _inflate(archive, entry, budget)
            else:
                others[name] = None
    return Archive(texts, tuple(others))


def _open(data: bytes) -> zipfile.ZipFile:
    # Counted in the bytes, since the count that the directory states can be wrong.
    if data.count(_DIRECTORY_ENTRY) > MAX_ENTRIES:
        raise ParseError(FailureReason.TOO_LARGE, f"the file holds more than {MAX_ENTRIES} parts")
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except _DAMAGE as error:
        raise ParseError(FailureReason.CORRUPT, "the file is damaged or cut short") from error


def _may_hold_text(name: str) -> bool:
    path = PurePosixPath(name)
    if _EMBEDDED_FOLDERS.intersection(path.parts[:-1]):
        return False
    return path.suffix.lower() in _TEXT_SUFFIXES


class _Budget:
    """Bytes that may still come out of one file."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._spent_bytes = 0

    def read(self, stream: IO[bytes]) -> bytes:
        """Read a stream to its end, counting.

        Raises:
            ParseError: `too_large`.
        """
        blocks: list[bytes] = []
        while block := stream.read(_BLOCK_BYTES):
            self._spent_bytes += len(block)
            if self._spent_bytes > self._limit_bytes:
                limit_mib = self._limit_bytes >> 20
                detail = f"the file unpacks to more than {limit_mib} MiB, its limit for its size"
                raise ParseError(FailureReason.TOO_LARGE, detail)
            blocks.append(block)
        return b"".join(blocks)


def _inflate(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, budget: _Budget) -> bytes:
    if entry.compress_type not in _METHODS:
        detail = f"{entry.filename} is compressed in a way that these files do not use"
        raise ParseError(FailureReason.CORRUPT, detail)
    try:
        with archive.open(entry) as stream:
            return budget.read(stream)
    except _DAMAGE as error:
        raise ParseError(FailureReason.CORRUPT, f"{entry.filename} is damaged") from error
