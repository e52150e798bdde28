"""An index as one block of bytes, which can be kept in a file and mapped.

Version 1, all numbers little-endian but tokens, which compare as their bytes do: a header of 128
bytes (magic, version, zero, number of tokens, number of hashed runs, SHA-256 of the tokens, BLAKE2b
of everything), then, each from a multiple of 64 bytes and padded with zeros, tokens, suffixes,
common prefixes, beginnings of the hashes, and the suffixes by hash: at most 18 bytes a token.
"""

import hashlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Block = bytes | mmap.mmap

TEXT_OFFSET = 128
"""Where the tokens begin."""

_MAGIC = b"rflookup"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ32s64s")
_ALIGNMENT = 64
_ITEM_BYTES = 4


class IndexDamaged(ValueError):
    """A block is no index of this version, or not as it was written."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexArrays:
    """What an index is made of, for `n` tokens with `g` different runs that are hashed.

    Attributes:
        key: SHA-256 of the tokens.
        text: Tokens, big-endian `[n]`.
        suffixes: Starts of the suffixes in their order `[n]`.
        common: Tokens that each has in common with the one before it `[n]`.
        buckets: Where each hash begins in `lows`, and where the last one ends `[n // 2 | 1 + 1]`.
        lows: Place of the first suffix that starts with a run, by hash `[g]`.
    """

    key: bytes
    text: NDArray[np.uint32]
    suffixes: NDArray[np.int32]
    common: NDArray[np.int32]
    buckets: NDArray[np.int32]
    lows: NDArray[np.int32]


def pack(arrays: IndexArrays) -> bytes:
    """Write the block."""
    parts = (
        arrays.text.astype(">u4"),
        *(
            part.astype("<i4")
            for part in (arrays.suffixes, arrays.common, arrays.buckets, arrays.lows)
        ),
    )
    payload = b"".join(part.tobytes().ljust(_aligned(part.nbytes), b"\0") for part in parts)
    fields = (_MAGIC, _VERSION, 0, len(arrays.text), len(arrays.lows), arrays.key)
    header = _HEADER.pack(*fields, _checksum(fields, payload))
    return header + payload


def unpack(block: Block) -> IndexArrays:
    """Read a block without copying it.

    Raises:
        IndexDamaged: It is something else.
    """
    if len(block) < TEXT_OFFSET:
        raise IndexDamaged(f"an index has {TEXT_OFFSET} bytes at least, not {len(block)}")
    magic, version, zero, num_tokens, num_runs, key, checksum = _HEADER.unpack_from(block)
    if (magic, version) != (_MAGIC, _VERSION):
        raise IndexDamaged(f"no index of version {_VERSION} begins with {magic!r}, {version}")
    lengths = (num_tokens, num_tokens, num_tokens, (num_tokens // 2 | 1) + 1, num_runs)
    num_bytes = TEXT_OFFSET + sum(_aligned(length * _ITEM_BYTES) for length in lengths)
    if len(block) != num_bytes:
        raise IndexDamaged(f"{num_tokens} tokens take {num_bytes} bytes, not {len(block)}")
    fields = (magic, version, zero, num_tokens, num_runs, key)
    if checksum != _checksum(fields, memoryview(block)[TEXT_OFFSET:]):
        raise IndexDamaged("the index is not as it was written: its checksum differs")
    text, *others = _arrays(block, lengths)
    return IndexArrays(key, text.view(">u4"), *(other.view("<i4") for other in others))


def _arrays(block: Block, lengths: tuple[int, ...]) -> Iterator[NDArray[np.uint32]]:
    offset = TEXT_OFFSET
    for length in lengths:
        yield np.frombuffer(block, np.uint32, length, offset)
        offset += _aligned(length * _ITEM_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _checksum(fields: tuple[bytes | int, ...], payload: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(_HEADER.pack(*fields, b""))
    digest.update(payload)
    return digest.digest()
