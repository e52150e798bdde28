"""The front of a GGUF file, parsed as hostile input.

Every count and length is compared with the bytes that are left before anything is allocated for
it, so a file costs memory in proportion to its own header and time linear in it. The format is
described in `docs/gguf.md` of the GGML library; versions 2 and 3, little-endian, are read.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ragflash.errors import GGUFInvalid, UnsupportedTensorType

MAX_HEADER_BYTES = 32 * 2**20  # a vocabulary of 262,144 tokens and its merges take about 16 MiB
MAX_ARRAY_ITEMS = 2 * 2**20  # of all arrays together; that vocabulary has 1.3 million
MAX_ARRAY_DEPTH = 4
MAX_NESTED_ARRAYS = 4 * 2**10  # in one file; no model is known to have any
MAX_METADATA_ENTRIES = 16 * 2**10
MAX_TENSORS = 64 * 2**10  # with each of 256 experts a tensor of its own, 46 thousand in 60 layers
MAX_NAME_BYTES = 2**16 - 1
MAX_DIMENSIONS = 4
MAX_ALIGNMENT_BYTES = 64 * 2**10
DEFAULT_ALIGNMENT_BYTES = 32

MetadataValue: TypeAlias = "bool | int | float | str | tuple[MetadataValue, ...]"

_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NUMBERS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: In the order of torch: rows first, the packed dimension last.
        offset_bytes: From the start of the file, or of its part of a split model.
        part: Which part of a split model holds it, from 0.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset_bytes: int
    num_bytes: int
    part: int = 0


def parse_header(
    data: mmap.mmap | bytes, file_bytes: int
) -> tuple[dict[str, MetadataValue], dict[str, TensorInfo]]:
    """Metadata and tensor table of the GGUF file whose bytes are `data`.

    Raises:
        GGUFInvalid: The bytes break the format or its limits.
        UnsupportedTensorType: A tensor's type is not in the format's list.
    """
    cursor = _Cursor(data, min(file_bytes, MAX_HEADER_BYTES))
    tensor_count, metadata_count = _parse_counts(cursor)
    metadata: dict[str, MetadataValue] = {}
    for i in range(metadata_count):
        at = cursor.position
        key = cursor.name(f"metadata key {i}")
        if key in metadata:
            raise GGUFInvalid(f"metadata key {key!r}", at, "occurs twice")
        metadata[key] = cursor.value(f"metadata {key!r}")
    alignment = _alignment(metadata, cursor.position)
    tensors: dict[str, TensorInfo] = {}
    for i in range(tensor_count):
        at = cursor.position
        tensor = _parse_tensor(cursor, i, alignment)
        if tensor.name in tensors:
            raise GGUFInvalid(f"tensor {tensor.name!r}", at, "occurs twice")
        tensors[tensor.name] = tensor
    data_start = -(-cursor.position // alignment) * alignment
    return metadata, _placed(tensors, data_start, file_bytes)


class _Cursor:
    """Reads values off `data` up to `limit`, which is never passed."""

    def __init__(self, data: mmap.mmap | bytes, limit: int) -> None:
        self._data = data
        self._limit = limit
        self._items_left = MAX_ARRAY_ITEMS
        self._arrays_left = MAX_NESTED_ARRAYS
        self.position = 0

    def take(self, num_bytes: int, field: str) -> int:
        """Step over `num_bytes`; the position before them."""
        start = self.position
        self.require_left(num_bytes, field)
        self.position = start + num_bytes
        return start

    def require_left(self, num_bytes: int, field: str) -> None:
        left = self._limit - self.position
        if num_bytes > left:
            of_what = "the largest header" if self._limit == MAX_HEADER_BYTES else "the file"
            raise GGUFInvalid(
                field, self.position, f"needs {num_bytes} bytes, {of_what} has {left} left"
            )

    def raw(self, num_bytes: int, field: str) -> bytes:
        start = self.take(num_bytes, field)
        return self._data[start : start + num_bytes]

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self._data, self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self._data, self.take(8, field))[0]
        return value

    def name(self, field: str) -> str:
        at = self.position
        value = self.strings(1, field)[0]
        if self.position - at - 8 > MAX_NAME_BYTES:
            raise GGUFInvalid(field, at, f"is longer than {MAX_NAME_BYTES} bytes")
        return value

    def count(self, field: str, *, largest: int, min_bytes: int) -> int:
        """A number of things of at least `min_bytes` each, which must fit into what is left."""
        at = self.position
        value = self.u64(field)
        if value > largest:
            raise GGUFInvalid(field, at, f"{value}, at most {largest} are read")
        self.require_left(value * min_bytes, field)
        return value

    def strings(self, count: int, field: str) -> tuple[str, ...]:
        """`count` length-prefixed strings; written for speed, a vocabulary passes through it."""
        data, limit, position = self._data, self._limit, self.position
        unpack = _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                end = start + unpack(data, position)[0]
                if end > limit:
                    break
                found.append(str(data[start:end], "utf-8"))
                position = end
        except UnicodeDecodeError as error:
            raise GGUFInvalid(field, position, "is not UTF-8") from error
        except struct.error:  # fewer than eight bytes of the file are left for a length
            end = position + 8
        if len(found) < count:
            self.position = position
            self.require_left(max(end - position, 8), field)
        self.position = position
        return tuple(found)

    def value_type(self, field: str) -> GGUFValueType:
        at = self.position
        number = self.u32(field)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise GGUFInvalid(field, at, f"value type {number} is unknown") from error

    def value(self, field: str) -> MetadataValue:
        kind = self.value_type(field)
        if kind is GGUFValueType.ARRAY:
            return self.array(field, depth=1)
        return self.values(kind, 1, field)[0]

    def array(self, field: str, depth: int) -> tuple[MetadataValue, ...]:
        at = self.position
        if depth > MAX_ARRAY_DEPTH:
            raise GGUFInvalid(field, at, f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        kind = self.value_type(field)
        count = self.u64(field)
        if count > self._items_left:
            raise GGUFInvalid(
                field, at, f"{count} items, arrays may hold {MAX_ARRAY_ITEMS} in one file"
            )
        self._items_left -= count
        if kind is GGUFValueType.ARRAY:
            if count > self._arrays_left:
                raise GGUFInvalid(
                    field, at, f"{count} arrays, arrays may hold {MAX_NESTED_ARRAYS} in one file"
                )
            self._arrays_left -= count
            return tuple(self.array(field, depth + 1) for _ in range(count))
        return self.values(kind, count, field)

    def values(self, kind: GGUFValueType, count: int, field: str) -> tuple[MetadataValue, ...]:
        """`count` values of one type that is not an array."""
        if kind is GGUFValueType.STRING:
            self.require_left(8 * count, field)
            return self.strings(count, field)
        if kind is GGUFValueType.BOOL:
            at = self.position
            raw = self.raw(count, field)
            if raw.strip(b"\x00\x01"):
                raise GGUFInvalid(field, at, "a truth value is neither 0 nor 1")
            return tuple(map(bool, raw))
        code = _NUMBERS[kind]
        start = self.take(count * struct.calcsize(f"<{code}"), field)
        numbers: tuple[int | float, ...] = struct.unpack_from(f"<{count}{code}", self._data, start)
        return numbers


def _parse_counts(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; the numbers of tensors and of metadata entries."""
    if cursor.raw(4, "magic") != b"GGUF":
        raise GGUFInvalid("magic", 0, "the file does not begin with GGUF")
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:
        raise GGUFInvalid("version", 4, "the file is big-endian; convert it to little-endian")
    if version not in (2, 3):
        raise GGUFInvalid("version", 4, f"version {version} is not read, only 2 and 3 are")
    tensor_count = cursor.count("tensor count", largest=MAX_TENSORS, min_bytes=_MIN_TENSOR_BYTES)
    metadata_count = cursor.count(
        "metadata count", largest=MAX_METADATA_ENTRIES, min_bytes=_MIN_METADATA_BYTES
    )
    return tensor_count, metadata_count


def _alignment(metadata: Mapping[str, MetadataValue], position: int) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT_BYTES or value & (value - 1):
        raise GGUFInvalid(
            "metadata 'general.alignment'",
            position,
            f"{value!r} is not a power of two between 8 and {MAX_ALIGNMENT_BYTES}",
        )
    return value


def _parse_tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    """One entry of the tensor table; its offset is still relative to the data."""
    name = cursor.name(f"tensor name {index}")
    at = cursor.position
    num_dimensions = cursor.u32(f"tensor {name!r} dimensions")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise GGUFInvalid(
            f"tensor {name!r} dimensions", at, f"{num_dimensions}, not 1 to {MAX_DIMENSIONS}"
        )
    extents = [cursor.u64(f"tensor {name!r} shape") for _ in range(num_dimensions)]
    type_at = cursor.position
    type_number = cursor.u32(f"tensor {name!r} type")
    try:
        tensor_type = GGMLQuantizationType(type_number)
    except ValueError as error:
        raise UnsupportedTensorType(
            f"tensor {name!r} type", type_at, f"{type_number} is no type of the format"
        ) from error
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if extents[0] % block_elements or 0 in extents:
        raise GGUFInvalid(
            f"tensor {name!r} shape",
            at + 4,
            f"{extents} does not hold rows of whole {tensor_type.name} blocks",
        )
    num_bytes = extents[0] // block_elements * block_bytes
    for extent in extents[1:]:
        num_bytes *= extent
    offset_at = cursor.position
    offset = cursor.u64(f"tensor {name!r} offset")
    if offset % alignment:
        raise GGUFInvalid(
            f"tensor {name!r} offset", offset_at, f"{offset} is not a multiple of {alignment}"
        )
    return TensorInfo(name, tuple(reversed(extents)), tensor_type, offset, num_bytes)


def _placed(
    tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int
) -> dict[str, TensorInfo]:
    """The same tensors with offsets from the start of the file, inside it and apart."""
    placed = {
        name: TensorInfo(name, t.shape, t.type, data_start + t.offset_bytes, t.num_bytes)
        for name, t in tensors.items()
    }
    in_order = sorted(placed.values(), key=lambda tensor: tensor.offset_bytes)
    for tensor in in_order:
        end = tensor.offset_bytes + tensor.num_bytes
        if end > file_bytes:
            raise GGUFInvalid(
                f"tensor {tensor.name!r}",
                tensor.offset_bytes,
                f"{tensor.num_bytes} bytes end at {end}, the file at {file_bytes}",
            )
    for before, after in pairwise(in_order):
        if before.offset_bytes + before.num_bytes > after.offset_bytes:
            raise GGUFInvalid(
                f"tensor {after.name!r}", after.offset_bytes, f"overlaps tensor {before.name!r}"
            )
    return placed
