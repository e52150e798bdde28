"""The chunked delta rule in Triton (Yang et al. 2024, arXiv:2412.06464, section 3.3).

With `S` the memory before a chunk, `G` the sum of log-decays from there to a row, and `T` the
inverse of I + tril(β_i exp(G_i − G_j) k_i·k_j, −1):

    d = T β (v − exp(G) k S),  o = exp(G) q S + tril(exp(G_i − G_j) q_i·k_j) d,
    S ← exp(G_last) S + kᵀ exp(G_last − G) d.

`solve_chunks_kernel` finds `T` and the factors of `d` in `o` for all chunks at once; only what
needs `S` is left to `chain_chunks_kernel`, which goes through them in order.

What the memory depends on is multiplied in two halves of a value, large and small, on tensor cores
(three products with float32 sums; relative errors of 2⁻¹⁶ with bfloat16). What only the output
depends on is rounded to the large half.
"""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns
from ragflash_kernels.conv1d.kernel import convolve
from ragflash_kernels.gated_delta.kernel import softplus, to_length_1

CHUNK = 64
_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """Return float32 as a large and a small part."""
    large = x.to(dtype)
    return large, (x - large.to(tl.float32)).to(dtype)


@triton.jit
def _dot(a, a_small, b, b_small, total):
    """Return `total` + the product of values in halves."""
    total = tl.dot(a_small, b, total)
    total = tl.dot(a, b_small, total)
    return tl.dot(a, b, total)


@triton.jit(do_not_specialize=["rows"])
def prepare_chunks_kernel(
    qkv, conv, tail, queries, keys, values, part_stride, row_stride, rows,
    PARTS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve one head of BLOCK rows; rows beyond the last become zeros.

    Arguments as in `delta_prefill`, of one slot. Written are, of T rows in whole chunks, `queries`
    `[T, Hk, D]` of length D ** -0.5, `keys` `[T, Hk, 2, D]`, the halves of keys of length 1, and
    `values` `[T, Hv, Dv]`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    head = tl.program_id(1)
    here = row < rows
    channels: tl.constexpr = 2 * KEY_HEADS * DIM + VALUE_HEADS * VALUE_DIM
    if head < 2 * KEY_HEADS:
        line = tl.arange(0, DIM)[None, :]
        key_channel = head * DIM + line
        key = convolve(
            qkv, part_stride, row_stride, tail, conv, row, 0, None, key_channel, here, channels,
            PARTS, WIDTH,
        )[0]  # fmt: skip
        key = to_length_1(key)
        if head < KEY_HEADS:
            query = (key * DIM**-0.5).to(queries.dtype.element_ty)
            tl.store(queries + row * (KEY_HEADS * DIM) + key_channel, query)
        else:
            large, small = _halves(key, keys.dtype.element_ty)
            key_at = (row * KEY_HEADS + head - KEY_HEADS) * (2 * DIM) + line
            tl.store(keys + key_at, large)
            tl.store(keys + key_at + DIM, small)
    else:
        column = (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)[None, :]
        channel = 2 * KEY_HEADS * DIM + column
        value = convolve(
            qkv, part_stride, row_stride, tail, conv, row, 0, None, channel, here, channels, PARTS,
            WIDTH,
        )[0]  # fmt: skip
        tl.store(values + row * (VALUE_HEADS * VALUE_DIM) + column, value)


@triton.jit
def _invert(coupling, dtype: tl.constexpr):
    """Return the inverse of I + `coupling`, which is 0 on the diagonal and above it.

    Row by row in blocks of 16, then by [[X, 0], [Y, Z]]⁻¹ = [[X⁻¹, 0], [−Z⁻¹ Y X⁻¹, Z⁻¹]]. Powers
    of the matrix, which would need no rows, grow until nothing is left where keys repeat.
    """
    n: tl.constexpr = _CHUNK // 16
    block = tl.arange(0, n)
    same = block[:, None, None, None] == block[None, None, :, None]
    inside = tl.sum(tl.where(same, tl.reshape(coupling, (n, 16, n, 16)), 0.0), 2)  # [n, 16, 16]
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    solved = tl.zeros((n, 16, 16), tl.float32) + (row == column).to(tl.float32)
    for step in range(15):
        factor = tl.sum(tl.where(column == step, inside, 0.0), 2)
        done = tl.sum(tl.where(row == step, solved, 0.0), 1)
        solved -= factor[:, :, None] * done[:, None, :]
    inverse = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), (_CHUNK, _CHUNK))
    i = tl.arange(0, _CHUNK)[:, None]
    j = tl.arange(0, _CHUNK)[None, :]
    nothing = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    for size in tl.static_range(2):
        half = 16 << size
        below = (i // (2 * half) == j // (2 * half)) & (i // half > j // half)
        known, known_small = _halves(inverse, dtype)
        y, y_small = _halves(tl.where(below, coupling, 0.0), dtype)
        left, left_small = _halves(_dot(known, known_small, y, y_small, nothing), dtype)
        inverse -= _dot(left, left_small, known, known_small, nothing)
    return inverse


@triton.jit(do_not_specialize=["rows", "chunks"])
def solve_chunks_kernel(
    queries, keys, beta, alpha, decay_rate, decay_bias, decay, steps, inverses, mixing,
    beta_part_stride, beta_row_stride, alpha_part_stride, alpha_row_stride, rows, chunks,
    BETA_PARTS: tl.constexpr, ALPHA_PARTS: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Find what a chunk's rows are to each other, for one value head.

    Reads what `prepare_chunks_kernel` wrote, the rest as in `delta_prefill`. Written are, of T rows
    in whole chunks, `decay` `[Hv, T]`: sums of log-decays from before the chunk to each row,
    `steps` `[Hv, T]`, `inverses` `[Hv, chunks, 2, 64, 64]`: the halves of `T` of the module's
    docstring, and `mixing` `[Hv, chunks, 64, 64]`: the factors of `d` in `o`.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, _CHUNK)
    j = i[None, :]
    row = chunk.to(tl.int64) * _CHUNK + i
    here = row < rows
    x = load_columns(alpha + head, alpha_part_stride, row * alpha_row_stride, here, ALPHA_PARTS)
    rate = tl.load(decay_rate + head) * softplus(x + tl.load(decay_bias + head))
    total = tl.cumsum(tl.where(here, rate, 0.0), 0)
    x = load_columns(beta + head, beta_part_stride, row * beta_row_stride, here, BETA_PARTS)
    step = tl.where(here, tl.sigmoid(x), 0.0)
    tl.store(decay + head * chunks * _CHUNK + row, total)
    tl.store(steps + head * chunks * _CHUNK + row, step)
    difference = total[:, None] - total[None, :]
    left = tl.exp(tl.where(i[:, None] >= j, difference, float("-inf")))

    width: tl.constexpr = DIM if DIM < 32 else 32  # of a head at a time, to save registers
    line = tl.arange(0, width)[None, :]
    at = row[:, None] * KEY_HEADS + head % KEY_HEADS
    couplings = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    products = couplings
    for first in range(0, DIM, width):
        k = tl.load(keys + at * (2 * DIM) + first + line)
        k_small = tl.load(keys + at * (2 * DIM) + DIM + first + line)
        q = tl.load(queries + at * DIM + first + line)
        couplings = _dot(k, k_small, tl.trans(k), tl.trans(k_small), couplings)
        products = tl.dot(q, tl.trans(k), products)
    place = (head * chunks + chunk).to(tl.int64) * (_CHUNK * _CHUNK)
    inside = i[:, None] * _CHUNK + j
    half: tl.constexpr = mixing.dtype.element_ty
    tl.store(mixing + place + inside, (products * left).to(half))
    coupling = tl.where(i[:, None] > j, couplings * left * step[:, None], 0.0)
    inverse, inverse_small = _halves(_invert(coupling, half), half)
    tl.store(inverses + 2 * place + inside, inverse)
    tl.store(inverses + 2 * place + _CHUNK * _CHUNK + inside, inverse_small)


@triton.jit(do_not_specialize=["rows", "chunks"])
def chain_chunks_kernel(
    queries, keys, values, decay, steps, inverses, mixing, memory, out, rows, chunks,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Go through all chunks with BLOCK value columns of one head's memory.

    Reads what the other kernels wrote; `out` `[rows, Hv, Dv]` is written, and if KEEP `memory`
    `[Hv, D, Dv]`.
    """
    head = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    line = tl.arange(0, DIM)
    i = tl.arange(0, _CHUNK)
    nothing = tl.zeros((_CHUNK, BLOCK), tl.float32)
    memory_at = memory + (head * DIM + line[:, None]) * VALUE_DIM + column
    state = tl.load(memory_at)
    for chunk in range(chunks):
        row = i.to(tl.int64) + chunk * _CHUNK
        at = row[:, None] * KEY_HEADS + head % KEY_HEADS
        k = tl.load(keys + at * (2 * DIM) + line[None, :])
        k_small = tl.load(keys + at * (2 * DIM) + DIM + line[None, :])
        q = tl.load(queries + at * DIM + line[None, :])
        total = tl.load(decay + head * chunks * _CHUNK + row)
        last = tl.load(decay + (head * chunks + chunk) * _CHUNK + _CHUNK - 1)
        step = tl.load(steps + head * chunks * _CHUNK + row)
        place = (head * chunks + chunk).to(tl.int64) * (_CHUNK * _CHUNK)
        place += i[:, None] * _CHUNK + i[None, :]
        inverse_at = inverses + (head * chunks + chunk).to(tl.int64) * (_CHUNK * _CHUNK) + place
        value_at = (row[:, None] * VALUE_HEADS + head) * VALUE_DIM + column
        left = tl.exp(total)[:, None]

        s, s_small = _halves(state, k.dtype)
        read = _dot(k, k_small, s, s_small, nothing)
        target = (tl.load(values + value_at) - left * read) * step[:, None]
        t, t_small = _halves(target, k.dtype)
        inverse = tl.load(inverse_at)
        inverse_small = tl.load(inverse_at + _CHUNK * _CHUNK)
        correction = _dot(inverse, inverse_small, t, t_small, nothing)
        output = tl.dot(q, s) * left
        output = tl.dot(tl.load(mixing + place), correction.to(k.dtype), output)
        tl.store(out + value_at, output.to(out.dtype.element_ty), mask=row[:, None] < rows)
        d, d_small = _halves(correction * tl.exp(last - total)[:, None], k.dtype)
        state = _dot(tl.trans(k), tl.trans(k_small), d, d_small, state * tl.exp(last))
    if KEEP:
        tl.store(memory_at, state)
