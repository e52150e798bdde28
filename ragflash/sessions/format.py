"""Bytes of a session file, version 1; docs/sessions.md has the table.

Header, tables, payload, footer. All start at multiples of 4 KiB and are padded with zeros; numbers
are little-endian; checksums are XXH3-128. Nothing here touches a disk.
"""

import json
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate

import xxhash

from ragflash.kvcache.allocator import PageForm
from ragflash.kvcache.archive import (
    PIECE_BYTES,
    FileMissReason,
    PageItem,
    PartItem,
    SnapshotItem,
)
from ragflash.kvcache.identity import FORMAT_VERSION, Identity, Value, spell
from ragflash.kvcache.segments import ROOT_KEY
from ragflash.sessions.records import (
    ORIGIN_COLUMNS,
    Item,
    PrefixKeys,
)

ALIGNMENT = 4096
HEADER_BYTES = 4096
FOOTER_BYTES = 4096
BLOCK_BYTES = PIECE_BYTES
"""A checksum is of so many bytes of an item; the header says how many, never more than these."""

_MAGIC = b"ragflash"
_FOOTER_MAGIC = b"complete"
_CHECKSUM_BYTES = 16
_IDENTITY_OFFSET = 256
_HEADER = struct.Struct("<8sII32s32s32s32sQQIIIIIIQQQdd16s")
_FOOTER = struct.Struct("<8sQ16s")
_ITEM = struct.Struct("<BBHIQQQ16s32s")
_NO_KEY = bytes(32)
_PAGE, _SNAPSHOT, _PART = 1, 2, 3
_FORMS = {PageForm.EXACT: 1, PageForm.PACKED: 2}
_FORM_NAMES = {number: form for form, number in _FORMS.items()}


class SegmentUnusable(Exception):
    """A file that is not used, with the reason; it never leaves the package."""

    def __init__(self, reason: FileMissReason, detail: str, field: str | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.field = field
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Header:
    """The first 4 KiB.

    Attributes:
        keys: Of the segment.
        identity: `Identity.named` of whoever wrote it.
        start: Tokens before the segment.
        num_tokens: Its own tokens.
        num_items: Rows of the item table.
        num_blocks: Rows of the checksum table.
        origin_columns: 4, or 0 where tokens have no origins.
        meta_bytes: Length of the namespace and source ids as JSON.
        prefill_seconds: What it took to compute.
        created_s: Unix time.
        tables_checksum: Of the tables with their padding.
        file_bytes: Of the whole file.
        block_bytes: See `BLOCK_BYTES`.
    """

    keys: PrefixKeys
    identity: dict[str, Value]
    start: int
    num_tokens: int
    num_items: int
    num_blocks: int
    origin_columns: int
    meta_bytes: int
    prefill_seconds: float
    created_s: float
    tables_checksum: bytes
    file_bytes: int
    block_bytes: int

    @property
    def tables_bytes(self) -> int:
        """Length of the tables without padding."""
        numbers = self.num_tokens * (1 + self.origin_columns)
        rows = self.num_items * _ITEM.size + self.num_blocks * _CHECKSUM_BYTES
        return 4 * numbers + rows + self.meta_bytes

    @property
    def payload_offset(self) -> int:
        """Where the first item starts."""
        return HEADER_BYTES + aligned(self.tables_bytes)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where an item is.

    Attributes:
        item: What it is.
        offset: In the file.
        part_identity: SHA-256 of what a part depends on beside the identity; zeros for others.
        checksums: Of each block.
    """

    item: Item
    offset: int
    part_identity: bytes
    checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Tables:
    """What lies between header and payload."""

    tokens: "array[int]"
    origins: "array[int]"
    extents: tuple[Extent, ...]
    namespace: str
    source_ids: tuple[str, ...]


def aligned(num_bytes: int) -> int:
    """Round up to what parts of the file start at."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def checksum(data: bytes | memoryview) -> bytes:
    """XXH3-128."""
    return xxhash.xxh3_128_digest(data)


def num_blocks(items: Sequence[Item], block_bytes: int) -> int:
    """Return how many checksums items have."""
    return sum(-(-item.num_bytes // block_bytes) for item in items)


def item_offsets(payload_offset: int, items: Sequence[Item]) -> tuple[list[int], int]:
    """Return where items lie, and the length of the whole file."""
    ends = accumulate((aligned(item.num_bytes) for item in items), initial=payload_offset)
    *offsets, end = ends
    return offsets, end + FOOTER_BYTES


def spell_meta(namespace: str, source_ids: Sequence[str]) -> bytes:
    """Spell what is text in the tables."""
    return json.dumps({"namespace": namespace, "source_ids": list(source_ids)}).encode("ascii")


def part_identity(item: Item, identity: Identity) -> bytes:
    """Return the digest of what a part depends on beside the identity; zeros for other items."""
    if not isinstance(item, PartItem):
        return _NO_KEY
    return sha256(identity.of_part(item.name).encode()).digest()


def encode_tables(tables: Tables) -> bytes:
    """Spell tables, padding included."""
    parts = [tables.tokens.tobytes(), tables.origins.tobytes()]
    parts += [_encode_item(extent) for extent in tables.extents]
    parts += [digest for extent in tables.extents for digest in extent.checksums]
    parts.append(spell_meta(tables.namespace, tables.source_ids))
    return _padded(b"".join(parts))


def decode_tables(header: Header, raw: bytes) -> Tables:
    """Read tables; raises `SegmentUnusable` when they are not those of the header."""
    if checksum(raw) != header.tables_checksum:
        raise _damaged("the tables' checksum differs")
    at = 4 * header.num_tokens
    tokens = array("I", raw[:at])
    origins = array("I", raw[at : (at := at + at * header.origin_columns)])
    rows = raw[at : (at := at + header.num_items * _ITEM.size)]
    digests = raw[at : (at := at + header.num_blocks * _CHECKSUM_BYTES)]
    try:
        meta = json.loads(raw[at : at + header.meta_bytes])
        namespace, source_ids = str(meta["namespace"]), tuple(map(str, meta["source_ids"]))
        extents = _decode_extents(header, rows, digests)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(f"the tables make no sense: {error}") from error
    return Tables(tokens, origins, extents, namespace, source_ids)


def encode_header(header: Header) -> bytes:
    """Spell the first 4 KiB."""
    named = spell(header.identity)
    fixed = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        header.block_bytes,
        header.keys.key,
        header.keys.parent or _NO_KEY,
        header.keys.lineage,
        sha256(named).digest(),
        header.start,
        header.num_tokens,
        header.num_items,
        header.num_blocks,
        header.origin_columns,
        header.meta_bytes,
        len(named),
        0,
        header.tables_bytes,
        header.payload_offset,
        header.file_bytes,
        header.prefill_seconds,
        header.created_s,
        header.tables_checksum,
    )
    return _sealed(fixed.ljust(_IDENTITY_OFFSET, b"\0") + named)


def decode_header(raw: bytes, file_bytes: int) -> Header:
    """Read the first 4 KiB of a file of `file_bytes`; raises `SegmentUnusable`."""
    if len(raw) != HEADER_BYTES or raw[: len(_MAGIC)] != _MAGIC:
        raise _damaged("it does not begin like a session file")
    if not _is_sealed(raw):
        raise _damaged("the header's checksum differs")
    _, version, block_bytes, key, parent, lineage, digest, *numbers = _HEADER.unpack_from(raw)
    if version != FORMAT_VERSION:
        detail = f"the file's format is {version}, not {FORMAT_VERSION}"
        raise SegmentUnusable(FileMissReason.IDENTITY_DIFFERS, detail, "format_version")
    start, num_tokens, num_items, blocks, columns, meta_bytes, named_bytes, *numbers = numbers
    _, tables_bytes, payload_offset, promised_bytes, seconds, created_s, tables_checksum = numbers
    header = Header(
        PrefixKeys(key, ROOT_KEY if parent == _NO_KEY else parent, lineage),
        _decode_identity(raw[_IDENTITY_OFFSET : _IDENTITY_OFFSET + named_bytes], digest),
        start,
        num_tokens,
        num_items,
        blocks,
        columns,
        meta_bytes,
        seconds,
        created_s,
        tables_checksum,
        promised_bytes,
        block_bytes,
    )
    if promised_bytes != file_bytes:
        raise _damaged(f"it has {file_bytes} bytes, not {promised_bytes}")
    placed = (header.tables_bytes, header.payload_offset)
    if placed != (tables_bytes, payload_offset) or columns not in {0, ORIGIN_COLUMNS}:
        raise _damaged("the header's sizes contradict each other")
    if not 0 <= seconds < math.inf or not math.isfinite(created_s):
        raise _damaged("the header's times are no times")
    if not 0 < block_bytes <= PIECE_BYTES:
        raise _damaged(f"its checksums are of {block_bytes} bytes each")
    if payload_offset + FOOTER_BYTES > file_bytes:
        raise _damaged("the tables do not fit the file")
    return header


def _decode_identity(named: bytes, digest: bytes) -> dict[str, Value]:
    if sha256(named).digest() != digest:
        raise _damaged("the identity's digest differs")
    try:
        fields = json.loads(named)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"the identity makes no sense: {error}") from error
    if not isinstance(fields, dict):
        raise _damaged("the identity has no fields")
    return fields


def encode_footer(header: bytes, file_bytes: int) -> bytes:
    """Spell the last 4 KiB, which say that a file with this header is complete."""
    return _sealed(_FOOTER.pack(_FOOTER_MAGIC, file_bytes, header[-_CHECKSUM_BYTES:]))


def check_footer(raw: bytes, header: bytes, file_bytes: int) -> None:
    """Raise `SegmentUnusable` unless these are the last 4 KiB of such a file."""
    if raw != encode_footer(header, file_bytes):
        raise _damaged("its end does not say that it is complete")


def _encode_item(extent: Extent) -> bytes:
    item, name = extent.item, b""
    if isinstance(item, PageItem):
        fixed = (_PAGE, _FORMS[item.form], 0, item.index, item.num_tokens)
    elif isinstance(item, SnapshotItem):
        fixed = (_SNAPSHOT, 0, 0, item.index, item.position)
    else:
        fixed = (_PART, 0, 0, 0, 0)
        name = item.name.encode("ascii")
    return _ITEM.pack(*fixed, extent.offset, item.num_bytes, name, extent.part_identity)


def _decode_item(row: bytes) -> tuple[Item, int, bytes]:
    kind, form, _, index, tokens, offset, num_bytes, name, identity = _ITEM.unpack(row)
    item: Item
    if kind == _PAGE:
        item = PageItem(_FORM_NAMES[form], index, tokens, num_bytes)
    elif kind == _SNAPSHOT:
        item = SnapshotItem(tokens, index, num_bytes)
    elif kind == _PART:
        item = PartItem(name.rstrip(b"\0").decode("ascii"), num_bytes)
    else:
        raise ValueError(f"an item of kind {kind}")
    return item, offset, identity


def _decode_extents(header: Header, rows: bytes, digests: bytes) -> tuple[Extent, ...]:
    decoded = [_decode_item(rows[at : at + _ITEM.size]) for at in range(0, len(rows), _ITEM.size)]
    items = [item for item, _, _ in decoded]
    offsets, end = item_offsets(header.payload_offset, items)
    counted = num_blocks(items, header.block_bytes)
    if [offset for _, offset, _ in decoded] != offsets or end != header.file_bytes:
        raise ValueError("items do not lie one after the other")
    if counted != header.num_blocks:
        raise ValueError(f"{counted} blocks, not {header.num_blocks}")
    found, at = [], 0
    for item, offset, identity in decoded:
        until = at + _CHECKSUM_BYTES * num_blocks([item], header.block_bytes)
        own = tuple(digests[i : i + _CHECKSUM_BYTES] for i in range(at, until, _CHECKSUM_BYTES))
        found.append(Extent(item, offset, identity, own))
        at = until
    return tuple(found)


def _sealed(data: bytes) -> bytes:
    body = data.ljust(HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
    return body + checksum(body)


def _is_sealed(raw: bytes) -> bool:
    return checksum(raw[:-_CHECKSUM_BYTES]) == raw[-_CHECKSUM_BYTES:]


def _padded(data: bytes) -> bytes:
    return data.ljust(aligned(len(data)), b"\0")


def _damaged(detail: str) -> SegmentUnusable:
    return SegmentUnusable(FileMissReason.DAMAGED, detail)
