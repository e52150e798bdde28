"""The data folder: who owns it, and the bytes in it.

Originals lie under the SHA-256 of their bytes, parsed documents and what is made of their text
under that and the parser's version. Names that people gave are labels in the catalogue and touch no
path.
"""

import fcntl
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, BinaryIO, Self
from uuid import uuid4

from ragflash.errors import DataFolderLocked, DocumentTooLarge, StorageError
from ragflash.rag.disk import Disk
from ragflash_ingest import wire
from ragflash_ingest.document import Document

_BLOCK_BYTES = 1 << 20
_KEPT_DOCUMENTS = 8
_INDEX_SUFFIX = ".lookup"


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn the operating system's refusals (full, read-only, broken disk) into `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error}") from error


class FolderLock:
    """Exclusive ownership of a data folder while the process lives."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def acquire(cls, folder: Path) -> Self:
        """Create the folder, for its owner only, and take it.

        Raises:
            DataFolderLocked: A living process has it; the text names its id.
            StorageError: The folder cannot be created or written.
        """
        with storage_errors(f"the data folder {folder} cannot be used"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            file = (folder / "lock").open("a+", encoding="ascii")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                file.close()
                raise DataFolderLocked(
                    f"process {owner} is using {folder}: stop it, or choose another data folder"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        return cls(file)

    def release(self) -> None:
        """Give the folder up."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class StagedBlob:
    """Bytes that were received and hashed, but have no place yet."""

    path: Path
    sha256: str
    size_bytes: int


class FileStore:
    """Originals and parsed documents; content first, so that a row never lacks its file.

    Every file is written aside, flushed, and renamed into place. The documents read last are kept
    in memory. Thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._disk = Disk()
        self._blobs = folder / "blobs"
        self._parsed = folder / "parsed"
        self._incoming = folder / "incoming"
        self._recent: OrderedDict[tuple[str, str], Document] = OrderedDict()
        self._recent_lock = threading.Lock()
        self._index_lock = threading.Lock()
        with storage_errors(f"the data folder {folder} cannot be used"):
            for child in (self._blobs, self._parsed, self._incoming):
                self._disk.make_folder(child)

    def left_overs(self) -> list[Path]:
        """Files that were being written; while nothing is written, those that a crash left."""
        with storage_errors("the data folder cannot be listed"):
            return sorted(self._incoming.iterdir())

    def remove_left_overs(self) -> None:
        """Remove what a crash left half written; nothing may be being written."""
        with storage_errors("the data folder cannot be tidied"):
            for path in self._incoming.iterdir():
                self._disk.remove(path)

    def stage(self, source: Path | BinaryIO | bytes, max_bytes: int) -> StagedBlob:
        """Copy and hash a source, block by block.

        Raises:
            DocumentTooLarge: It has more bytes than `max_bytes`, by count.
            StorageError: It cannot be read, or the disk refused.
        """
        path = self._incoming / uuid4().hex
        digest, size = sha256(), 0

        def counted() -> Iterator[bytes]:
            nonlocal size
            for block in _blocks(source):
                size += len(block)
                _check_size(size, max_bytes)
                digest.update(block)
                yield block

        with storage_errors("the document cannot be stored"):
            self._disk.write(path, counted())
        return StagedBlob(path, digest.hexdigest(), size)

    def keep(self, staged: StagedBlob) -> None:
        """Give staged bytes their place; the same bytes have the same place."""
        place = self.blob_path(staged.sha256)
        with storage_errors("the document cannot be stored"):
            self._disk.make_folder(place.parent)
            self._disk.move(staged.path, place)

    def discard(self, staged: StagedBlob) -> None:
        """Drop staged bytes that are not needed."""
        with storage_errors("the document's files cannot be removed"):
            self._disk.remove(staged.path)

    def blob_path(self, digest: str) -> Path:
        """Where the original with this SHA-256 lies, if it does."""
        return self._blobs / digest[:2] / digest

    def write_document(self, digest: str, document: Document) -> None:
        """Store what a parser made of an original."""
        place = self._parsed_folder(digest, document.parser)
        with storage_errors("the document's text cannot be stored"):
            self._disk.make_folder(place)
            if document.boxes is not None:
                self._write(place / "boxes", document.boxes.to_bytes())
            self._write(place / "document.json", wire.to_json(document))

    def has_document(self, digest: str, parser: str) -> bool:
        """Whether what a parser made of an original is there."""
        return (self._parsed_folder(digest, parser) / "document.json").is_file()

    def read_document(self, digest: str, parser: str) -> Document:
        """Load a parsed document.

        Raises:
            StorageError: It is not there, or damaged.
        """
        with self._recent_lock:
            if (digest, parser) not in self._recent:
                self._recent[digest, parser] = self._load(digest, parser)
            self._recent.move_to_end((digest, parser))
            while len(self._recent) > _KEPT_DOCUMENTS:
                self._recent.popitem(last=False)
            return self._recent[digest, parser]

    def write_index(self, digest: str, parser: str, tokenizer: str, block: bytes) -> None:
        """Store the index of a parsed document's tokens in place of those of other tokenizers.

        Args:
            digest: SHA-256 of the original.
            parser: What made the text of it.
            tokenizer: Fingerprint of what cut the text.
            block: The index.

        Raises:
            StorageError: There is no such document, or no longer, or the disk refused.
        """
        place = self._index_path(digest, parser, tokenizer)
        with storage_errors("the document's index cannot be stored"), self._index_lock:
            for other in [*place.parent.iterdir()]:  # raises when the document is gone
                if other.suffix == _INDEX_SUFFIX and other != place:
                    self._disk.remove(other)
            self._write(place, block)

    def map_index(self, digest: str, parser: str, tokenizer: str) -> mmap.mmap | None:
        """Map the index of a parsed document's tokens; `None` where none is stored.

        Raises:
            StorageError: The disk refused.
            ValueError: The file is empty.
        """
        with storage_errors("the document's index cannot be read"):
            try:
                return self._disk.map(self._index_path(digest, parser, tokenizer))
            except FileNotFoundError:
                return None

    def drop(self, digest: str) -> None:
        """Remove an original and everything made of it."""
        with (
            storage_errors("the document's files cannot be removed"),
            self._index_lock,  # whoever waits to store an index finds no folder any more
            self._recent_lock,
        ):
            for key in [key for key in self._recent if key[0] == digest]:
                del self._recent[key]
            self._disk.remove(self.blob_path(digest))
            self._disk.remove_folder(self._parsed / digest[:2] / digest)

    def digests(self) -> set[str]:
        """SHA-256 of every original and of every original that something was made of."""
        with storage_errors("the data folder cannot be listed"):
            return {path.name for root in (self._blobs, self._parsed) for path in root.glob("*/*")}

    def _load(self, digest: str, parser: str) -> Document:
        place = self._parsed_folder(digest, parser)
        with storage_errors("the document's text cannot be read"):
            header = self._disk.read(place / "document.json")
            boxes = self._disk.read(place / "boxes") if (place / "boxes").exists() else b""
        try:
            return wire.from_json(header, boxes)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"the stored text in {place} is damaged: {error}") from error

    def _parsed_folder(self, digest: str, parser: str) -> Path:
        version = sha256(parser.encode()).hexdigest()[:16]
        return self._parsed / digest[:2] / digest / version

    def _index_path(self, digest: str, parser: str, tokenizer: str) -> Path:
        return self._parsed_folder(digest, parser) / f"{tokenizer[:16]}{_INDEX_SUFFIX}"

    def _write(self, place: Path, data: bytes) -> None:
        path = self._incoming / uuid4().hex
        self._disk.write(path, (data,))
        try:
            self._disk.move(path, place)
        except OSError:
            self._disk.remove(path)
            raise


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise DocumentTooLarge(f"the document has more than {max_bytes:,} bytes")


def _blocks(source: Path | BinaryIO | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
