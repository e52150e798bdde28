"""Matrices repacked into records, and back: plain torch, on any device.

How a record is laid out is described in `formats.py`. Axes are named as there: T tiles of 32 rows,
R records of S steps, then j, g, c, i and h (the half).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.qmatmul.blocks import BlockParts, take_apart
from ragflash_kernels.qmatmul.formats import (
    COLUMNS_PER_STEP,
    IQ4_VALUES,
    RECORD_FORMATS,
    ROWS_PER_RECORD,
    RecordFormat,
    Scales,
)
from ragflash_kernels.quant_layout import BLOCK_FORMATS

_SLAB_ELEMENTS = 2**26  # of a matrix taken apart at a time; the work space is a few times as much


@dataclass(frozen=True)
class PackedMatrix:
    """A quantised matrix `[rows, columns]` in records.

    Attributes:
        records: uint8 `[tiles of 32 rows, records, bytes of a record]`, contiguous.
        block_format: A key of `RECORD_FORMATS`.
        rows: Of the matrix; rows of the last tile beyond them are zero.
        columns: Of the matrix; columns of the last record beyond them are zero.
    """

    records: Tensor
    block_format: str
    rows: int
    columns: int

    @property
    def layout(self) -> RecordFormat:
        """How the records are laid out."""
        return RECORD_FORMATS[self.block_format]

    @property
    def steps(self) -> int:
        """Steps of 32 columns in a record."""
        return self.layout.steps(self.columns)


def pack_matrix(blocks: Tensor, *, block_format: str) -> PackedMatrix:
    """Repack the rows of a GGML matrix.

    Takes 2.8 % more bytes for Q4_K, 2.3 % for Q5_K, 1.5 % for IQ4_XS and none for the others, if
    rows are a multiple of 32 and columns of 64.

    Args:
        blocks: uint8 `[N, row_bytes]`, on any device.
        block_format: A key of `RECORD_FORMATS`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if block_format not in RECORD_FORMATS:
        raise KernelInputError(
            f"block format {block_format!r} is not one of {', '.join(RECORD_FORMATS)}"
        )
    sizes = BLOCK_FORMATS[block_format]
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or 0 in blocks.shape:
        raise KernelInputError(
            f"blocks must be uint8 [N, row_bytes], not {blocks.dtype} {tuple(blocks.shape)}"
        )
    if blocks.shape[1] % sizes.bytes_per_block:
        raise KernelInputError(
            f"a row of {blocks.shape[1]} bytes is not a whole number of {block_format} blocks "
            f"of {sizes.bytes_per_block} bytes"
        )
    rows = blocks.shape[0]
    columns = blocks.shape[1] // sizes.bytes_per_block * sizes.elements_per_block
    layout = RECORD_FORMATS[block_format]
    steps = layout.steps(columns)
    tiles, num_records = -(-rows // ROWS_PER_RECORD), -(-columns // (COLUMNS_PER_STEP * steps))
    records = torch.empty(
        (tiles, num_records, layout.offsets(steps).size), dtype=torch.uint8, device=blocks.device
    )
    slab_tiles = max(1, _SLAB_ELEMENTS // (ROWS_PER_RECORD * columns))
    for first in range(0, tiles, slab_tiles):
        target = records[first : first + slab_tiles]
        slab = blocks[first * ROWS_PER_RECORD : (first + slab_tiles) * ROWS_PER_RECORD]
        parts = _padded(take_apart(slab, block_format), len(target), num_records * steps)
        planes = _planes(parts, layout, len(target), num_records, steps)
        torch.cat([plane.reshape(*target.shape[:2], -1) for plane in planes], 2, out=target)
    return PackedMatrix(records, block_format, rows, columns)


def unpack_records(matrix: PackedMatrix) -> Tensor:
    """Return what the records stand for, float32 `[rows, columns]`."""
    parts = _parts(matrix)
    layout = matrix.layout
    if layout.table:
        levels = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=parts.codes.device)
        values = levels[parts.codes.int()]
    elif layout.minima:
        values = parts.codes.float()
    else:
        sign = 1 << (layout.code_bits - 1)
        values = (parts.codes ^ sign).float() - sign
    scales = parts.scales.float()
    if layout.scales in (Scales.SIGNED_BYTES, Scales.SIGNED_BYTES_OF_16):
        scales -= 128
    if parts.factors is not None:
        scales *= _spread(parts.factors[..., 0].float(), scales)
    values *= _spread(scales, values)
    if parts.minima is not None:
        minima = parts.minima.float()
        if parts.factors is not None:
            minima *= -_spread(parts.factors[..., 1].float(), minima)
        values += _spread(minima, values)
    return values[: matrix.rows, : matrix.columns].contiguous()


def _spread(narrow: Tensor, wide: Tensor) -> Tensor:
    return narrow.repeat_interleave(wide.shape[1] // narrow.shape[1], 1)


def _padded(parts: BlockParts, tiles: int, steps: int) -> BlockParts:
    """Add zero rows and columns up to whole tiles and records."""
    rows = tiles * ROWS_PER_RECORD - parts.codes.shape[0]
    columns = steps * COLUMNS_PER_STEP - parts.codes.shape[1]
    if not rows and not columns:
        return parts
    blocks = columns // COLUMNS_PER_STEP  # formats with factors have whole records
    return BlockParts(
        pad(parts.codes, (0, columns, 0, rows)),
        pad(parts.scales, (0, blocks, 0, rows)),
        None if parts.minima is None else pad(parts.minima, (0, blocks, 0, rows)),
        None if parts.factors is None else pad(parts.factors, (0, 0, 0, 0, 0, rows)),
    )


def _planes(
    parts: BlockParts, layout: RecordFormat, tiles: int, records: int, steps: int
) -> list[Tensor]:
    """Return the parts of every record as bytes, in order, each beginning with T and R."""
    codes = parts.codes.view(tiles, 4, 8, records, steps, 2, 4, 4)  # T j g R S h c i
    planes = [_low_plane(codes, layout)]
    if layout.high_bits:
        planes.append(_high_plane(codes >> 4, layout.high_bits))
    per_row = (tiles, 4, 8, records)
    match layout.scales:
        case Scales.FLOAT16:
            scales = parts.scales.view(*per_row, steps // 2, 2).permute(0, 3, 4, 2, 5, 1)
        case Scales.SIGNED_BYTES_OF_16:
            scales = parts.scales.view(*per_row, 4, 2, 2).permute(0, 3, 4, 2, 5, 6, 1)
        case _:
            scales = parts.scales.view(*per_row, 2, 4).permute(0, 3, 4, 2, 5, 1)
    planes.append(_bytes(scales))
    if parts.minima is not None and layout.scales is Scales.FLOAT16:
        planes.append(_bytes(parts.minima.view(*per_row, steps).permute(0, 3, 2, 4, 1)))
    elif parts.minima is not None:
        planes.append(_bytes(parts.minima.view(*per_row, 2, 4).permute(0, 3, 2, 5, 4, 1)))
    if parts.factors is not None:
        planes.append(_bytes(parts.factors.view(*per_row, -1).permute(0, 3, 2, 1, 4)))
    return planes


def _bytes(plane: Tensor) -> Tensor:
    return plane.contiguous().view(torch.uint8)


def _low_plane(codes: Tensor, layout: RecordFormat) -> Tensor:
    if layout.low_bits == 8:
        return codes.permute(0, 3, 4, 5, 2, 6, 1, 7)  # T R S h g c j i
    low = codes & 15
    if layout.table:
        pairs = low[..., 0::2] | (low[..., 1::2] << 4)
        return pairs.permute(0, 3, 4, 2, 6, 1, 5, 7)  # T R S g c j h pair
    pairs = low[..., 0, :, :] | (low[..., 1, :, :] << 4)
    return pairs.permute(0, 3, 4, 2, 5, 1, 6)  # T R S g c j i


def _high_plane(high: Tensor, bits: int) -> Tensor:
    tiles, _, _, records, steps = high.shape[:5]
    if bits == 1:
        word = sum(high[:, j, :, :, :, h] << (2 * j + h) for j in range(4) for h in range(2))
        assert isinstance(word, Tensor)  # T g R S c i
        word = word.view(tiles, 8, records, -1, min(steps, 4), 4, 4)
        return word.permute(0, 2, 3, 1, 5, 4, 6)  # T R piece g c step i
    words = [
        sum(high[:, 2 * p + j, :, :, :, h] << (4 * j + 2 * h) for j in range(2) for h in range(2))
        for p in range(2)
    ]
    both = torch.stack([word for word in words if isinstance(word, Tensor)], -1)  # T g R S c i p
    return both.view(tiles, 8, records, 4, 2, 4, 4, 2).permute(0, 2, 3, 1, 5, 4, 7, 6)


def _parts(matrix: PackedMatrix) -> BlockParts:
    """Undo `_planes`."""
    layout, steps = matrix.layout, matrix.steps
    offsets = layout.offsets(steps)
    tiles, records, _ = matrix.records.shape
    rows = tiles * ROWS_PER_RECORD

    def part(start: int, end: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        part = matrix.records[:, :, start:end].contiguous().view(dtype)
        return part.view(tiles, records, *shape)

    codes = _low_codes(part(0, offsets.high, steps, -1), layout)
    if layout.high_bits:
        codes |= _high_codes(part(offsets.high, offsets.scales, -1), layout.high_bits, steps) << 4
    span = (offsets.scales, offsets.minima)
    low_span = (offsets.minima, offsets.factors)
    minima = factors = None
    if layout.scales is Scales.FLOAT16:
        half = torch.float16
        scales = part(*span, steps // 2, 8, 2, 4, dtype=half).permute(0, 5, 3, 1, 2, 4)
        if layout.minima:
            minima = part(*low_span, 8, steps, 4, dtype=half).permute(0, 4, 2, 1, 3)
    else:
        if layout.scales is Scales.SIGNED_BYTES_OF_16:
            scales = part(*span, 4, 8, 2, 2, 4).permute(0, 6, 3, 1, 2, 4, 5)
        else:
            scales = part(*span, 2, 8, 4, 4).permute(0, 5, 3, 1, 2, 4)
        if layout.minima:
            minima = part(*low_span, 8, 4, 2, 4).permute(0, 5, 2, 1, 4, 3)
        factors = part(offsets.factors, offsets.size, 8, 4, 1 + layout.minima, dtype=torch.float16)
        factors = factors.permute(0, 3, 2, 1, 4).reshape(rows, records, -1)
    return BlockParts(
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if minima is None else minima.reshape(rows, -1),
        factors,
    )


def _low_codes(plane: Tensor, layout: RecordFormat) -> Tensor:
    """Return `[T j g R S h c i]` from bytes `[T, R, S, …]`."""
    head = plane.shape[:3]
    if layout.low_bits == 8:
        return plane.view(*head, 2, 8, 4, 4, 4).permute(0, 6, 4, 1, 2, 3, 5, 7)
    if layout.table:
        pairs = plane.view(*head, 8, 4, 4, 2, 2).permute(0, 5, 3, 1, 2, 6, 4, 7)
        return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    pairs = plane.view(*head, 8, 4, 4, 4).permute(0, 5, 3, 1, 2, 4, 6)  # T j g R S c i
    return torch.stack([pairs & 15, pairs >> 4], 5)


def _high_codes(plane: Tensor, bits: int, steps: int) -> Tensor:
    """Return `[T j g R S h c i]` from bytes `[T, R, …]`."""
    tiles, records, _ = plane.shape
    if bits == 1:
        word = plane.view(tiles, records, -1, 8, 4, min(steps, 4), 4).permute(0, 3, 1, 2, 5, 4, 6)
        word = word.reshape(tiles, 8, records, steps, 4, 4)  # T g R S c i
        rows = [torch.stack([(word >> 2 * j + h) & 1 for h in range(2)], 4) for j in range(4)]
        return torch.stack(rows, 1)
    both = plane.view(tiles, records, 4, 8, 4, 2, 2, 4).permute(0, 6, 3, 1, 2, 5, 4, 7)
    both = both.reshape(tiles, 2, 8, records, steps, 4, 4)  # T p g R S c i
    rows = [
        torch.stack([(both[:, p] >> 4 * j + 2 * h) & 3 for h in range(2)], 4)
        for p in range(2)
        for j in range(2)
    ]
    return torch.stack(rows, 1)
