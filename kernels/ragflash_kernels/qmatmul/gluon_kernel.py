"""The product on NVIDIA cards: records straight into int8 matrix instructions; and unpacking.

A warp multiplies 32 rows of a matrix with up to 32 activation rows, split by split: neighbouring
warps take neighbouring rows and share the activations. What a row of activations comes to depends
neither on the other rows nor on their number: every sum is taken in the same order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragflash_kernels.qmatmul import ptx
from ragflash_kernels.qmatmul.formats import Scales
from ragflash_kernels.qmatmul.gluon_loads import (
    byte_to_float,
    copy_record,
    half_to_float,
    load_codes,
    load_factors,
    load_record,
    load_words,
    prefetch_record,
    read_factors,
    reserve_ring,
    wait_for_record,
)
from ragflash_kernels.qmatmul.gluon_parts import multiply_record, read_codes, read_scale

_FLOAT16 = gl.constexpr(int(Scales.FLOAT16))
_OF_16 = gl.constexpr(int(Scales.SIGNED_BYTES_OF_16))
_STORE_BFLOAT16 = gl.constexpr(ptx.store_eight("cvt.rn.bf16x2.f32"))
_STORE_FLOAT16 = gl.constexpr(ptx.store_eight("cvt.rn.f16x2.f32"))
_STORE_CONSTRAINTS = gl.constexpr(ptx.constraints("r", "ffffffffrrl"))


@gluon.jit
def _store(out, total, tile, lane, rows, out_columns, FACTOR: gl.constexpr, TILES: gl.constexpr,
           ONE: gl.constexpr):  # fmt: skip
    size: gl.constexpr = 2 if ONE else 4
    for i in gl.static_range(2 * size * TILES):
        n = tile * 32 + (lane >> 2) + i // (size * TILES) * 16 + i % size // (size // 2) * 8
        m = (lane & 3) if ONE else 2 * (lane & 3) + i % 2 + i // 4 % TILES * 8
        mask = (m < rows) & (n < out_columns)
        gl.store(out + m * out_columns + n, total[i] * FACTOR, mask=mask)


@gluon.jit
def _zeros(lane, COUNT: gl.constexpr):
    out = ()
    for _ in gl.static_range(COUNT):
        out = out + ((lane * 0).to(gl.float32),)
    return out


@gluon.jit
def _begin_copies(record, thread, num_records, RECORD_BYTES: gl.constexpr, WARPS: gl.constexpr):
    """Begin to copy a warp's first two records; return where they go."""
    lane = thread & 31
    slot = reserve_ring(thread >> 5, RECORD_BYTES, WARPS)
    other = slot + RECORD_BYTES
    copy_record(slot, record, lane, lane * 0 + 1, RECORD_BYTES)
    second = lane * 0 + (num_records > 1).to(gl.int32)
    copy_record(other, record + RECORD_BYTES, lane, second, RECORD_BYTES)
    return slot, other


@gluon.jit(do_not_specialize=["rows", "out_columns", "tiles", "num_records", "records_per_split"])
def qmatmul_gluon_kernel(
    records, q, scales, sums, out, rows, out_columns, tiles, num_records, records_per_split,
    RECORD_BYTES: gl.constexpr, HIGH: gl.constexpr, SCALES: gl.constexpr, MINIMA: gl.constexpr,
    FACTORS: gl.constexpr, STEPS: gl.constexpr, LOW_BITS: gl.constexpr, HIGH_BITS: gl.constexpr,
    TABLE: gl.constexpr, KIND: gl.constexpr, HAS_MINIMA: gl.constexpr, TILES: gl.constexpr,
    ONE: gl.constexpr, WARPS: gl.constexpr, PREFETCH: gl.constexpr, STAGED: gl.constexpr,
    EAGER: gl.constexpr,
):  # fmt: skip
    """Multiply one tile's records of one split a warp: `out[split, rows, out_columns]`.

    The first arguments are as in `kernel.qmatmul_kernel`. TILES is the number of tiles of eight
    activation rows; ONE says that there is only one row. PREFETCH asks for the next record early,
    STAGED copies two records ahead into shared memory. EAGER lets the next kernel start, and waits
    for the one before when weights are on their way.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, layout=layout)
    lane = thread & 31
    tile = gl.minimum(gl.program_id(0) * WARPS + (thread >> 5), tiles - 1)
    split = gl.program_id(1)
    if EAGER:
        gdc_launch_dependents()
    total = _zeros(lane, (4 if ONE else 8) * TILES)
    q_lane = q.to(gl.int64) + ((lane & 3) if ONE else lane) * 16
    scale_lane = scales.to(gl.int64) + (lane * 0 if ONE else (lane & 3) * 64)
    first = split * records_per_split
    end = gl.minimum(first + records_per_split, num_records)
    record = records.to(gl.int64) + (tile * num_records + first).to(gl.int64) * RECORD_BYTES
    if STAGED:
        slot, other = _begin_copies(record, thread, end - first, RECORD_BYTES, WARPS)
        if EAGER:
            gdc_wait()
    for index in range(first, end):
        place = record
        if STAGED:
            wait_for_record(lane)
            place = slot
        loaded = load_record(
            place, lane, HIGH, SCALES, MINIMA, FACTORS, STEPS, LOW_BITS, HIGH_BITS, KIND,
            HAS_MINIMA, STAGED,
        )  # fmt: skip
        if PREFETCH:
            if index + 1 < end:
                prefetch_record(record + RECORD_BYTES, lane, RECORD_BYTES)
        if EAGER and not STAGED:
            if index == first:
                gdc_wait()
        total = multiply_record(
            loaded, place, lane, q_lane, scale_lane, sums.to(gl.int64), total, index, HIGH, SCALES,
            STEPS, LOW_BITS, HIGH_BITS, TABLE, KIND, HAS_MINIMA, TILES, ONE, STAGED,
        )  # fmt: skip
        if STAGED:
            wanted = lane * 0 + (index + 2 < end).to(gl.int32)
            copy_record(slot, record + 2 * RECORD_BYTES, lane, wanted, RECORD_BYTES)
            slot, other = other, slot
        record += RECORD_BYTES
    shift: gl.constexpr = 0 if HAS_MINIMA or TABLE else 8 - LOW_BITS - HIGH_BITS
    at = out + (split * rows).to(gl.int64) * out_columns
    _store(at, total, tile, lane, rows, out_columns, 1.0 / (1 << shift), TILES, ONE)


@gluon.jit
def _load_all_minima(place, lane, STEPS: gl.constexpr, KIND: gl.constexpr):
    """Return words with the minima of a lane's four rows in all steps."""
    g = lane >> 2
    if KIND == _FLOAT16:
        words = load_words(place + g * (8 * STEPS), 1, 4, "once")
        for i in gl.static_range(1, STEPS // 2):
            words = words + load_words(place + g * (8 * STEPS) + 16 * i, 1, 4, "once")
    else:
        words = load_words(place + g * 32, 1, 4, "once")
        words = words + load_words(place + g * 32 + 16, 1, 4, "once")
    return words


@gluon.jit
def _minimum(words, factors, step: gl.constexpr, j: gl.constexpr, KIND: gl.constexpr):
    """Return what is added to row j's values in a step."""
    if KIND == _FLOAT16:
        low = half_to_float(words[2 * step + j // 2], j % 2)
    else:
        stored = byte_to_float(words[step % 4 * 2 + step // 4], j)
        low = (stored - 8388608.0) * factors[j]
    return low


@gluon.jit
def _four_values(codes, scale, low, SIGNED: gl.constexpr, SHIFT: gl.constexpr,
                 HAS_MINIMA: gl.constexpr):  # fmt: skip
    """Return the floats of four codes; signed ones fill the upper bits of their bytes."""
    biased = codes ^ -0x7F7F7F80 if SIGNED else codes
    bias: gl.constexpr = 8388736.0 if SIGNED else 8388608.0
    narrowed = scale * (1.0 / (1 << SHIFT))
    out = ()
    for i in gl.static_range(4):
        value = (byte_to_float(biased, i) - bias) * narrowed
        if HAS_MINIMA:
            value = value + low
        out = out + (value,)
    return out


@gluon.jit(do_not_specialize=["rows", "columns", "num_records", "num_units"])
def unpack_gluon_kernel(
    records, out, rows, columns, num_records, num_units,
    RECORD_BYTES: gl.constexpr, HIGH: gl.constexpr, SCALES: gl.constexpr, MINIMA: gl.constexpr,
    FACTORS: gl.constexpr, STEPS: gl.constexpr, LOW_BITS: gl.constexpr, HIGH_BITS: gl.constexpr,
    TABLE: gl.constexpr, KIND: gl.constexpr, HAS_MINIMA: gl.constexpr, WARPS: gl.constexpr,
    BFLOAT16: gl.constexpr,
):  # fmt: skip
    """Unpack a record a warp into `out [rows, columns]`; compile without fused products.

    `num_units` is the number of all records, of which a tile has `num_records`; `out` is bfloat16
    or float16.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, layout=layout)
    lane = thread & 31
    unit = gl.minimum(gl.program_id(0) * WARPS + (thread >> 5), num_units - 1)
    tile = unit // num_records
    record = records.to(gl.int64) + unit.to(gl.int64) * RECORD_BYTES
    low, high, stored = load_codes(record, lane, HIGH, SCALES, STEPS, LOW_BITS, HIGH_BITS, KIND)
    factor_words = load_factors(record + FACTORS, lane, KIND, HAS_MINIMA, "once")
    factors, lowered, of_minima = read_factors(factor_words, lane, KIND, HAS_MINIMA)
    minima = _load_all_minima(record + MINIMA, lane, STEPS, KIND) if HAS_MINIMA else factors
    odd = lane & 1
    row = tile * 32 + (lane >> 2)
    column = (unit - tile * num_records) * (32 * STEPS) + (lane & 2) * 4 + odd * 16
    at = out.to(gl.int64) + (row.to(gl.int64) * columns + column) * 2
    row_bytes = columns.to(gl.int64) * 16
    shift: gl.constexpr = 0 if HAS_MINIMA or TABLE else 8 - LOW_BITS - HIGH_BITS
    for step in gl.static_range(STEPS):
        for j in gl.static_range(4):
            codes = read_codes(low, high, step, j, LOW_BITS, HIGH_BITS, not HAS_MINIMA, TABLE)
            scale = read_scale(stored, factors[j], lowered[j], step, 0, j, KIND)
            second = scale
            if KIND == _OF_16:
                second = read_scale(stored, factors[j], lowered[j], step, 1, j, KIND)
            added = scale
            if HAS_MINIMA:
                added = _minimum(minima, of_minima, step, j, KIND)
            values = _four_values(codes[0], scale, added, not HAS_MINIMA, shift, HAS_MINIMA)
            values = values + _four_values(
                codes[1], second, added, not HAS_MINIMA, shift, HAS_MINIMA
            )
            writes = ((row + 8 * j < rows) & (column + 32 * step < columns)).to(gl.int32)
            gl.inline_asm_elementwise(
                _STORE_BFLOAT16 if BFLOAT16 else _STORE_FLOAT16, _STORE_CONSTRAINTS,
                values + (odd, writes, at + j * row_bytes + 64 * step),
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
