"""A GGUF model, mapped into memory: metadata parsed at once, tensors as bytes on demand."""

import hashlib
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragflash.errors import GGUFInvalid, ModelMissing, TensorMissing
from ragflash.gguf.disk_cache import read_checked, write_checked
from ragflash.gguf.header import MetadataValue, TensorInfo, parse_header
from ragflash.gguf.split import Part, find_parts, join_parts
from ragflash.gguf.types import block_format_of

__all__ = ["GGUFFile", "MetadataValue", "TensorInfo", "content_hash"]

# Linux on x86-64 and arm64; the mmap module has no name for it before Python 3.13.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_Scalar = TypeVar("_Scalar", bool, int, float, str)


class GGUFFile:
    """A model that was found to be well formed, in one file or in several parts.

    Immutable, hence safe to share between threads. Closing it gives up its own hold on the
    mappings; arrays from `tensor_blocks` stay valid for as long as they live.

    Attributes:
        paths: Where it was opened, in the order of the parts.
        metadata: Key to value, of the first part; arrays are tuples.
        tensors: Name to place, in the order of the files.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        mappings: Sequence[mmap.mmap],
        metadata: Mapping[str, MetadataValue],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.paths = tuple(paths)
        self.metadata = MappingProxyType(metadata)
        self.tensors = MappingProxyType(tensors)
        self._mappings: Sequence[mmap.mmap] | None = mappings

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Map the file, or all parts of a split one, and parse the headers.

        Args:
            path: The file, any part of a split one, or the folder that holds it alone.

        Raises:
            ModelMissing: There is no readable file at `path`, or a part of it is not there.
            GGUFInvalid: It is not a well-formed GGUF file, or its parts do not belong together.
        """
        paths = find_parts(Path(path))
        mappings = [_mapped(part) for part in paths]
        parts = [_parsed(*part) for part in zip(paths, mappings, strict=True)]
        return cls(paths, mappings, *join_parts(parts))

    @property
    def path(self) -> Path:
        """The file, or the first part of a split one."""
        return self.paths[0]

    def close(self) -> None:
        """Give up the mappings; metadata and tensor table stay."""
        self._mappings = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def tensor_blocks(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, `[rows, row_bytes]`, without a copy.

        Dimensions before the last are folded into rows. Do not write to it: other views of the
        same file object would change, though never the file.

        Raises:
            TensorMissing: The file has no such tensor.
            UnsupportedTensorType: It is stored in a format that ragflash does not read.
            ValueError: The file was closed.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise TensorMissing(f"{self.path.name} has no tensor {name!r}")
        if self._mappings is None:
            raise ValueError(f"{self.path} is closed")
        block_format = block_format_of(tensor)
        row_bytes = tensor.shape[-1] // block_format.elements_per_block
        row_bytes *= block_format.bytes_per_block
        mapping = self._mappings[tensor.part]
        stored = np.frombuffer(mapping, np.uint8, tensor.num_bytes, tensor.offset_bytes)
        return stored.reshape(-1, row_bytes)

    def get(self, key: str, kind: type[_Scalar]) -> _Scalar | None:
        """The value at `key`, or None where the key is absent.

        Raises:
            GGUFInvalid: The value is of another type than `kind`.
        """
        value = self.metadata.get(key)
        if value is None or type(value) is kind:
            return value
        raise GGUFInvalid(key, 0, f"is a {type(value).__name__}, not a {kind.__name__}")

    def require(self, key: str, kind: type[_Scalar]) -> _Scalar:
        """The value at `key`.

        Raises:
            GGUFInvalid: The key is absent, or its value of another type than `kind`.
        """
        value = self.get(key, kind)
        if value is None:
            raise GGUFInvalid(key, 0, "the metadata lacks this key")
        return value

    def get_array(self, key: str, kind: type[_Scalar]) -> tuple[_Scalar, ...] | None:
        """The array of `kind` at `key`, or None where the key is absent.

        Raises:
            GGUFInvalid: The value is no array, or one of another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, tuple):
            items = tuple(item for item in value if type(item) is kind)
            if len(items) == len(value):
                return items
        raise GGUFInvalid(key, 0, f"is not an array of {kind.__name__}")

    def require_array(self, key: str, kind: type[_Scalar]) -> tuple[_Scalar, ...]:
        """The array of `kind` at `key`.

        Raises:
            GGUFInvalid: The key is absent, its value no array, or one of another type.
        """
        value = self.get_array(key, kind)
        if value is None:
            raise GGUFInvalid(key, 0, "the metadata lacks this key")
        return value


def content_hash(path: Path | str, cache_dir: Path | None = None) -> str:
    """SHA-256 of the bytes of the file, in hexadecimal; of a split model that of its parts' hashes.

    With `cache_dir` the answer is kept there for as long as path, size and modification time
    stay the same.

    Args:
        path: As `GGUFFile.open` takes it.
        cache_dir: Where to keep answers.

    Raises:
        ModelMissing: There is no readable file at `path`, or a part of it is not there.
        StorageError: The cache folder cannot be read or written.
    """
    hashes = [_file_hash(part, cache_dir) for part in find_parts(Path(path))]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("\n".join(hashes).encode("ascii")).hexdigest()


def _file_hash(path: Path, cache_dir: Path | None) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = f"{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
            name = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
            cached = cache_dir / "content_hashes" / name if cache_dir else None
            if cached and (known := read_checked(cached)):
                return known.decode("ascii")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelMissing(f"{path} cannot be read: {error.strerror}") from error
    if cached:
        write_checked(cached, digest.encode("ascii"))
    return digest


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes == 0:
                raise GGUFInvalid("magic", 0, f"{path.name} is empty")
            # Private and writable, so that torch takes views of it without a copy; without
            # a reservation, since nothing is ever written.
            return mmap.mmap(
                file.fileno(),
                file_bytes,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
    except OSError as error:
        raise ModelMissing(f"{path} cannot be read: {error.strerror}") from error


def _parsed(path: Path, mapping: mmap.mmap) -> Part:
    try:
        metadata, tensors = parse_header(mapping, len(mapping))
    except GGUFInvalid as error:
        kind, reason = type(error), f"{error.reason}, in {path.name}"
        raise kind(error.field, error.offset_bytes, reason) from error
    return Part(path, metadata, tensors)
