"""The product on NVIDIA cards: records straight into int8 matrix instructions.

A warp multiplies 32 rows of a matrix with up to 32 activation rows, split by split: neighbouring
warps take neighbouring rows and share the activations. What a row of activations comes to depends
neither on the other rows nor on their number: every sum is taken in the same order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragflash_kernels.qmatmul.gluon_parts import (
    add_minima,
    load_activation_sums,
    load_record,
    multiply_record,
    prefetch_record,
)


@gluon.jit
def _store(out, total, tile, lane, rows, out_columns, FACTOR: gl.constexpr, TILES: gl.constexpr,
           ONE: gl.constexpr):  # fmt: skip
    size: gl.constexpr = 2 if ONE else 4
    for i in gl.static_range(2 * size * TILES):
        n = tile * 32 + (lane >> 2) + i // (size * TILES) * 16 + i % size // (size // 2) * 8
        m = (lane & 3) if ONE else 2 * (lane & 3) + i % 2 + i // 4 % TILES * 8
        mask = (m < rows) & (n < out_columns)
        gl.store(out + m * out_columns + n, total[i] * FACTOR, mask=mask)


@gluon.jit(do_not_specialize=["rows", "out_columns", "tiles", "num_records", "records_per_split"])
def qmatmul_gluon_kernel(
    records, q, scales, sums, out, rows, out_columns, tiles, num_records, records_per_split,
    RECORD_BYTES: gl.constexpr, HIGH: gl.constexpr, SCALES: gl.constexpr, MINIMA: gl.constexpr,
    FACTORS: gl.constexpr, STEPS: gl.constexpr, LOW_BITS: gl.constexpr, HIGH_BITS: gl.constexpr,
    TABLE: gl.constexpr, KIND: gl.constexpr, HAS_MINIMA: gl.constexpr, TILES: gl.constexpr,
    ONE: gl.constexpr, WARPS: gl.constexpr, PREFETCH: gl.constexpr, EAGER: gl.constexpr,
):  # fmt: skip
    """Multiply one tile's records of one split a warp: `out[split, rows, out_columns]`.

    The first arguments are as in `kernel.qmatmul_kernel`. TILES is the number of tiles of eight
    activation rows; ONE says that there is only one row. PREFETCH asks for the next record early.
    EAGER lets the next kernel start, and waits for the one before when weights are on their way.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, layout=layout)
    lane = thread & 31
    tile = gl.minimum(gl.program_id(0) * WARPS + (thread >> 5), tiles - 1)
    split = gl.program_id(1)
    if EAGER:
        gdc_launch_dependents()
    total = ()
    for _ in gl.static_range((4 if ONE else 8) * TILES):
        total = total + ((lane * 0).to(gl.float32),)
    q_lane = q.to(gl.int64) + ((lane & 3) if ONE else lane) * 16
    scale_lane = scales.to(gl.int64) + (lane * 0 if ONE else (lane & 3) * 64)
    first = split * records_per_split
    end = gl.minimum(first + records_per_split, num_records)
    for index in range(first, end):
        record = records.to(gl.int64) + (tile * num_records + index).to(gl.int64) * RECORD_BYTES
        low, high, stored, factors, lowered, minima, of_minima = load_record(
            record, lane, HIGH, SCALES, MINIMA, FACTORS, STEPS, LOW_BITS, HIGH_BITS, KIND,
            HAS_MINIMA,
        )  # fmt: skip
        if PREFETCH:
            if index + 1 < end:
                prefetch_record(record + RECORD_BYTES, lane, RECORD_BYTES)
        if EAGER:
            if index == first:
                gdc_wait()
        block = index * STEPS // 8 * TILES
        first_step = index * STEPS % 8
        total = multiply_record(
            (low, high, stored, factors, lowered), q_lane + block * 2048 + first_step * 256,
            scale_lane + block * 256 + first_step * 8, total, STEPS, LOW_BITS, HIGH_BITS, TABLE,
            KIND, HAS_MINIMA, TILES, ONE,
        )  # fmt: skip
        if HAS_MINIMA:
            at = sums.to(gl.int64) + block * 512
            x_sums = load_activation_sums(at, lane, first_step, TILES, STEPS, ONE)
            total = add_minima(total, minima, of_minima, x_sums, TILES, ONE, KIND)
    shift: gl.constexpr = 0 if HAS_MINIMA or TABLE else 8 - LOW_BITS - HIGH_BITS
    at = out + (split * rows).to(gl.int64) * out_columns
    _store(at, total, tile, lane, rows, out_columns, 1.0 / (1 << shift), TILES, ONE)
