"""The product in plain Triton: any card that Triton knows, and its interpreter.

`quantize_rows_kernel` and `sum_splits_kernel` serve the kernel for NVIDIA cards too,
`store_quantized` all kernels that products follow.
"""

import triton
import triton.language as tl

from ragflash_kernels.qmatmul.activations import LARGEST_AMPLITUDE, SMALLEST_AMPLITUDE
from ragflash_kernels.qmatmul.formats import Scales

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
_SMALLEST = tl.constexpr(SMALLEST_AMPLITUDE)
_LARGEST = tl.constexpr(LARGEST_AMPLITUDE)
_TF32_BITS = tl.constexpr(-8192)
_FLOAT16 = tl.constexpr(int(Scales.FLOAT16))
_BYTES = tl.constexpr(int(Scales.BYTES))
_OF_16 = tl.constexpr(int(Scales.SIGNED_BYTES_OF_16))


@triton.jit
def store_quantized(values, row, block, step, tiles, q_out, scales_out, sums_out, here=None):
    """Quantise some steps of one row into `ActivationBuffers`; compile without fused products.

    Args:
        values: float32 `[S, 32]`.
        row: Of the buffers.
        block: Of 256 columns, the one that the steps are in, or `[S]` of them.
        step: `[S]`: which of its eight steps they are.
        tiles: Of the buffers.
        q_out: `ActivationBuffers.q`, as int8.
        scales_out: As there.
        sums_out: As there.
        here: `[S]`: which steps are stored; None for all.
    """
    amplitude = tl.max(tl.abs(values), 1)
    poison = tl.where(amplitude <= _LARGEST, tl.sum(values * 0.0, 1), float("nan"))
    scale = (amplitude * (1.0 / 127.0)).to(tl.int32, bitcast=True) & -4
    scale = scale.to(tl.float32, bitcast=True)
    usable = (amplitude >= _SMALLEST) & (poison == 0.0)
    scale = tl.where(usable, scale, 0.0)
    inverse = tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)
    rounded = (tl.where(usable[:, None], values, 0.0) * inverse[:, None] + _ROUND) - _ROUND
    scale += poison
    place = (block * tiles + row // 8 + step * 0).to(tl.int64)
    g = row % 8
    k = tl.arange(0, 32)[None, :]
    c = k % 16 // 4
    s = step[:, None]
    at = s // 2 * 512 + (g * 4 + c) * 16 + s % 2 * 8 + k // 16 * 4 + k % 4
    mask = None if here is None else here[:, None]
    tl.store(q_out + place[:, None] * 2048 + at, rounded.to(tl.int8), mask=mask)
    tl.store(scales_out + place * 64 + g // 2 * 16 + step * 2 + g % 2, scale, mask=here)
    total = tl.sum(rounded, 1) * scale
    rough = (total.to(tl.int32, bitcast=True) & _TF32_BITS).to(tl.float32, bitcast=True)
    tl.store(sums_out + place * 128 + step * 16 + g * 2, rough, mask=here)
    tl.store(sums_out + place * 128 + step * 16 + g * 2 + 1, total - rough, mask=here)


@triton.jit(do_not_specialize=["row_stride", "columns", "tiles"])
def quantize_rows_kernel(
    x, q_out, scales_out, sums_out, row_stride, columns, tiles, EAGER: tl.constexpr
):
    """Quantise 256 columns of one row into `ActivationBuffers`.

    Args:
        x: Float `[M, columns]` of `row_stride`.
        q_out: `ActivationBuffers.q`, as int8.
        scales_out: As there.
        sums_out: As there.
        row_stride: Elements.
        columns: Columns of the last block beyond them become zeros.
        tiles: Of the buffers.
        EAGER: Let the next kernel start, and wait for the one before only here (sm_90).
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = tl.arange(0, 8)
    column = block * 256 + step[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row.to(tl.int64) * row_stride + column, mask=column < columns, other=0.0)
    store_quantized(values.to(tl.float32), row, block, step, tiles, q_out, scales_out, sums_out)


@triton.jit(do_not_specialize=["rows", "columns", "partial_columns"])
def sum_splits_kernel(
    partial, out, rows, columns, partial_columns, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    EAGER: tl.constexpr,
):  # fmt: skip
    """Add `[SPLITS, rows, partial_columns]` in order into `[rows, columns]`."""
    row = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = row.to(tl.int64) * partial_columns + column
    mask = column < columns
    total = tl.zeros((WIDTH,), tl.float32)
    for split in tl.static_range(SPLITS):
        start = split * rows.to(tl.int64) * partial_columns
        total += tl.load(partial + start + at, mask=mask, other=0.0)
    tl.store(out + row.to(tl.int64) * columns + column, total, mask=mask)


@triton.jit
def _codes(record, levels, step, half: tl.constexpr, high, STEPS: tl.constexpr,
           LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, SIGN: tl.constexpr,
           TABLE: tl.constexpr):  # fmt: skip
    """Return float16 `[16 k, 32 rows]`: half a step of a record's codes."""
    row = tl.arange(0, 32)[None, :]
    k = tl.arange(0, 16)[:, None]
    j, lane, i = row // 8, row % 8 * 4 + k // 4, k % 4
    if LOW_BITS == 8:
        stored = tl.load(record + step * 1024 + half * 512 + lane * 16 + j * 4 + i)
        codes = stored.to(tl.int8, bitcast=True).to(tl.float16)
    elif TABLE:
        pair = tl.load(record + step * 512 + lane * 16 + j * 4 + half * 2 + i // 2)
        codes = tl.load(levels + ((pair.to(tl.int32) >> (i % 2 * 4)) & 15)).to(tl.float16)
    else:
        pair = tl.load(record + step * 512 + lane * 16 + j * 4 + i)
        raw = (pair.to(tl.int32) >> (half * 4)) & 15
        if HIGH_BITS == 1:
            per_piece: tl.constexpr = min(STEPS, 4)
            piece = step // per_piece * 128 * per_piece
            byte = tl.load(high + piece + (lane * per_piece + step % per_piece) * 4 + i)
            raw |= ((byte.to(tl.int32) >> (2 * j + half)) & 1) << 4
        if HIGH_BITS == 2:
            byte = tl.load(high + step // 2 * 512 + lane * 16 + step % 2 * 8 + j // 2 * 4 + i)
            raw |= ((byte.to(tl.int32) >> (j % 2 * 4 + half * 2)) & 3) << 4
        codes = ((raw ^ SIGN) - SIGN).to(tl.float16)
    return codes


@triton.jit
def _scales(place, factor, step, half: tl.constexpr, KIND: tl.constexpr):
    """Return float32 `[32 rows]`: the scales of a step, or of half of one."""
    row = tl.arange(0, 32)
    g, j = row % 8, row // 8
    if KIND == _FLOAT16:
        at = step // 2 * 128 + g * 16 + step % 2 * 8 + j * 2
        scale = tl.load((place + at).to(tl.pointer_type(tl.float16))).to(tl.float32)
    elif KIND == _BYTES:
        stored = tl.load(place + step // 4 * 128 + g * 16 + step % 4 * 4 + j)
        scale = stored.to(tl.float32) * factor
    elif KIND == _OF_16:
        stored = tl.load(place + step // 2 * 128 + g * 16 + step % 2 * 8 + half * 4 + j)
        scale = (stored.to(tl.float32) - 128.0) * factor
    else:
        stored = tl.load(place + step // 4 * 128 + g * 16 + step % 4 * 4 + j)
        scale = (stored.to(tl.float32) - 128.0) * factor
    return scale


@triton.jit
def _minima(place, step, STEPS: tl.constexpr, KIND: tl.constexpr):
    """Return float32 `[32 rows]`: the minima of a step, without their factor."""
    row = tl.arange(0, 32)
    g, j = row % 8, row // 8
    if KIND == _FLOAT16:
        at = (g * STEPS + step) * 8 + j * 2
        low = tl.load((place + at).to(tl.pointer_type(tl.float16))).to(tl.float32)
    else:
        low = tl.load(place + (g * 4 + step % 4) * 8 + step // 4 * 4 + j).to(tl.float32)
    return low


@triton.jit
def _factors(place, of_minima: tl.constexpr, KIND: tl.constexpr, HAS_MINIMA: tl.constexpr):
    """Return float32 `[32 rows]`: the factors of byte scales, or those of byte minima."""
    row = tl.arange(0, 32)
    if KIND == _FLOAT16:
        factor = tl.full((32,), 1.0, tl.float32)
    else:
        width: tl.constexpr = 4 if HAS_MINIMA else 2
        at = place + row % 8 * (4 * width) + row // 8 * width + 2 * of_minima
        factor = tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)
        if of_minima:
            factor = -factor
    return factor


@triton.jit
def _multiply_step(
    total, record, levels, x, x_scale, factor, step, here,
    HIGH: tl.constexpr, SCALES: tl.constexpr, STEPS: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, SIGN: tl.constexpr, TABLE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add the products of a step, without minima, to `total [M, 32 rows]`."""
    products = tl.zeros(total.shape, tl.float32)
    for half in tl.static_range(2):
        w = _codes(
            record, levels, step, half, record + HIGH, STEPS, LOW_BITS, HIGH_BITS, SIGN, TABLE
        )
        x_half = tl.load(x + half * 4, mask=here[:, None], other=0).to(tl.float16)
        products = tl.dot(x_half, w, products)  # of integers below 2**24: exact
        if KIND == _OF_16:
            scale = _scales(record + SCALES, factor, step, half, KIND)
            total += products * x_scale[:, None] * scale[None, :]
            products = tl.zeros(total.shape, tl.float32)
    if KIND != _OF_16:
        scale = _scales(record + SCALES, factor, step, 0, KIND)
        total += products * x_scale[:, None] * scale[None, :]
    return total


@triton.jit(do_not_specialize=["rows", "out_columns", "num_records", "records_per_split", "tiles"])
def qmatmul_kernel(
    records, levels, q, scales, sums, out, rows, out_columns, num_records, records_per_split,
    tiles, RECORD_BYTES: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    MINIMA: tl.constexpr, FACTORS: tl.constexpr, STEPS: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, SIGN: tl.constexpr, TABLE: tl.constexpr, KIND: tl.constexpr,
    HAS_MINIMA: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Multiply M rows with one tile's records of one split: `out[split, rows, out_columns]`.

    `q`, `scales` and `sums` are `ActivationBuffers` of so many `tiles`, q as int8.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, M)
    k = tl.arange(0, 16)[None, :]
    here = m < tiles * 8
    q_at = m[:, None] // 8 * 2048 + (m[:, None] % 8 * 4 + k // 4) * 16 + k % 4
    scale_at = m // 8 * 64 + m % 8 // 2 * 16 + m % 2
    sum_at = m // 8 * 128 + m % 8 * 2
    total = tl.zeros((M, 32), tl.float32)
    end = tl.minimum((split + 1) * records_per_split, num_records)
    for index in range(split * records_per_split, end):
        record = records + (tile.to(tl.int64) * num_records + index) * RECORD_BYTES
        block = (index * STEPS // 8 * tiles).to(tl.int64)
        factor = _factors(record + FACTORS, 0, KIND, HAS_MINIMA)
        of_minima = _factors(record + FACTORS, 1, KIND, HAS_MINIMA)
        for step in range(STEPS):
            s = index * STEPS % 8 + step
            x_scale = tl.load(scales + block * 64 + scale_at + s * 2, mask=here, other=0.0)
            x = q + block * 2048 + q_at + s // 2 * 512 + s % 2 * 8
            total = _multiply_step(
                total, record, levels, x, x_scale, factor, step, here,
                HIGH, SCALES, STEPS, LOW_BITS, HIGH_BITS, SIGN, TABLE, KIND,
            )  # fmt: skip
            if HAS_MINIMA:
                low = _minima(record + MINIMA, step, STEPS, KIND) * of_minima
                place = sums + block * 128 + sum_at + s * 16
                sum_x = tl.load(place, mask=here, other=0.0)
                sum_x += tl.load(place + 1, mask=here, other=0.0)
                total += sum_x[:, None] * low[None, :]
    column = tile * 32 + tl.arange(0, 32)
    at = (split * rows + m[:, None]).to(tl.int64) * out_columns + column[None, :]
    tl.store(out + at, total, mask=(m < rows)[:, None] & (column < out_columns)[None, :])


@triton.jit(do_not_specialize=["rows", "out_columns", "num_blocks", "blocks_per_split", "tiles"])
def dense_kernel(
    weight, q, scales, out, rows, out_columns, columns, num_blocks, blocks_per_split, tiles,
    M: tl.constexpr, WIDTH: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Multiply M rows with WIDTH rows of a float matrix: `out[split, rows, out_columns]`.

    Integers of the grid are exact in every float type, so only sums are rounded; of float32
    weights 22 bits count. A split is so many blocks of 256 columns.
    """
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    split = tl.program_id(1)
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, M)
    k = tl.arange(0, 32)
    here = m < tiles * 8
    q_at = m // 8 * 2048 + m % 8 * 64
    q_at = q_at[:, None] + (k % 16 // 4 * 16 + k // 16 * 4 + k % 4)[None, :]
    scale_at = m // 8 * 64 + m % 8 // 2 * 16 + m % 2
    weight_row = weight + n.to(tl.int64)[None, :] * columns
    total = tl.zeros((M, WIDTH), tl.float32)
    end = tl.minimum((split + 1) * blocks_per_split, num_blocks) * 8
    for step in range(split * blocks_per_split * 8, end):
        column = step * 32 + k[:, None]
        mask = (column < columns) & (n < out_columns)[None, :]
        w = tl.load(weight_row + column, mask=mask, other=0.0)
        place = (step // 8 * tiles).to(tl.int64)
        x_at = q + place * 2048 + q_at + (step % 8 // 2 * 512 + step % 2 * 8)
        x = tl.load(x_at, mask=here[:, None], other=0).to(w.dtype)
        x_scale_at = scales + place * 64 + scale_at + step % 8 * 2
        x_scale = tl.load(x_scale_at, mask=here, other=0.0)
        total += tl.dot(x, w, input_precision="tf32x3") * x_scale[:, None]
    at = (split * rows + m[:, None]).to(tl.int64) * out_columns + n[None, :]
    tl.store(out + at, total, mask=(m < rows)[:, None] & (n < out_columns)[None, :])


@triton.jit(do_not_specialize=["rows", "columns", "num_records"])
def unpack_kernel(
    records, levels, out, rows, columns, num_records, RECORD_BYTES: tl.constexpr,
    HIGH: tl.constexpr, SCALES: tl.constexpr, MINIMA: tl.constexpr, FACTORS: tl.constexpr,
    STEPS: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, SIGN: tl.constexpr,
    TABLE: tl.constexpr, KIND: tl.constexpr, HAS_MINIMA: tl.constexpr,
):  # fmt: skip
    """Unpack one record into `out [rows, columns]`, rounding once."""
    tile = tl.program_id(0)
    index = tl.program_id(1)
    record = records + (tile.to(tl.int64) * num_records + index) * RECORD_BYTES
    row = tile * 32 + tl.arange(0, 32)[None, :]
    factor = _factors(record + FACTORS, 0, KIND, HAS_MINIMA)
    of_minima = _factors(record + FACTORS, 1, KIND, HAS_MINIMA)
    for step in range(STEPS):
        for half in tl.static_range(2):
            codes = _codes(
                record, levels, step, half, record + HIGH, STEPS, LOW_BITS, HIGH_BITS, SIGN, TABLE
            )
            scale = _scales(record + SCALES, factor, step, half, KIND)
            values = codes.to(tl.float32) * scale[None, :]
            if HAS_MINIMA:
                low = _minima(record + MINIMA, step, STEPS, KIND) * of_minima
                values += low[None, :]
            column = (index * STEPS + step) * 32 + half * 16 + tl.arange(0, 16)[:, None]
            at = row.to(tl.int64) * columns + column
            mask = (row < rows) & (column < columns)
            tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)
