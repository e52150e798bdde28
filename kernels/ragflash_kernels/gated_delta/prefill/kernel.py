"""The chunked delta rule in Triton (Yang et al. 2024, arXiv:2412.06464, section 3.3).

With `S` the memory before a chunk, `G` the sum of log-decays from there to a row, and `T` the
inverse of I + tril(β_i exp(G_i − G_j) k_i·k_j, −1):

    d = T β (v − exp(G) k S),  o = exp(G) q S + tril(exp(G_i − G_j) q_i·k_j) d,
    S ← exp(G_last) S + kᵀ exp(G_last − G) d.

`solve_chunks_kernel` finds `T` and the factors of `d` in `o` for all chunks at once; only what
needs `S` is left to `chain_chunks_kernel`, which goes through them in order.
"""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns
from ragflash_kernels.conv1d.kernel import convolve
from ragflash_kernels.gated_delta.kernel import softplus, to_length_1

CHUNK = 64
_CHUNK = tl.constexpr(CHUNK)


@triton.jit(do_not_specialize=["rows"])
def prepare_chunks_kernel(
    qkv, conv, tail, queries, keys, values, part_stride, row_stride, rows, PARTS: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve one head of BLOCK rows; rows beyond the last become zeros.

    Arguments as in `delta_prefill`, of one slot. Written are, of T rows in whole chunks, `queries`
    `[T, Hk, D]` of length D ** -0.5, `keys` `[T, Hk, D]` of length 1, and `values` `[T, Hv, Dv]`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    head = tl.program_id(1)
    here = row < rows
    channels: tl.constexpr = 2 * KEY_HEADS * DIM + VALUE_HEADS * VALUE_DIM
    if head < 2 * KEY_HEADS:
        key_channel = head * DIM + tl.arange(0, DIM)[None, :]
        key, _ = convolve(
            qkv, part_stride, row_stride, tail, conv, row, 0, key_channel, here, channels, PARTS,
            WIDTH,
        )  # fmt: skip
        key = to_length_1(key)
        key_at = row * (KEY_HEADS * DIM) + key_channel
        if head < KEY_HEADS:
            tl.store(queries + key_at, (key * DIM**-0.5).to(queries.dtype.element_ty))
        else:
            tl.store(keys + key_at - KEY_HEADS * DIM, key)
    else:
        column = (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)[None, :]
        channel = 2 * KEY_HEADS * DIM + column
        value, _ = convolve(
            qkv, part_stride, row_stride, tail, conv, row, 0, channel, here, channels, PARTS, WIDTH
        )
        tl.store(values + row * (VALUE_HEADS * VALUE_DIM) + column, value)


@triton.jit
def _invert(coupling, PRECISION: tl.constexpr):
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
    for size in tl.static_range(2):
        half = 16 << size
        off = tl.where(
            (i // (2 * half) == j // (2 * half)) & (i // half > j // half), coupling, 0.0
        )
        left = tl.dot(inverse, off, input_precision=PRECISION)
        inverse -= tl.dot(left, inverse, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["rows", "chunks"])
def solve_chunks_kernel(
    queries, keys, beta, alpha, decay_rate, decay_bias, decay, steps, inverses, mixing,
    beta_part_stride, beta_row_stride, alpha_part_stride, alpha_row_stride, rows, chunks,
    BETA_PARTS: tl.constexpr, ALPHA_PARTS: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Find what a chunk's rows are to each other, for all value heads of one key head.

    Reads what `prepare_chunks_kernel` wrote, the rest as in `delta_prefill`. Written are, of T rows
    in whole chunks, `decay` `[Hv, T]`: sums of log-decays from before the chunk to each row,
    `steps` `[Hv, T]`, `inverses` `[Hv, chunks, 64, 64]`: `T` of the module's docstring, and
    `mixing`, of the same shape: the factors of `d` in `o`. PRECISION is of products that the state
    depends on.
    """
    chunk = tl.program_id(0)
    key_head = tl.program_id(1)
    i = tl.arange(0, _CHUNK)
    j = i[None, :]
    row = chunk.to(tl.int64) * _CHUNK + i
    here = row < rows
    at = (row[:, None] * KEY_HEADS + key_head) * DIM + tl.arange(0, DIM)[None, :]
    k = tl.load(keys + at)
    q = tl.load(queries + at)
    couplings = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    for group in range(VALUE_HEADS // KEY_HEADS):
        head = group * KEY_HEADS + key_head
        x = load_columns(beta + head, beta_part_stride, row * beta_row_stride, here, BETA_PARTS)
        step = tl.where(here, tl.sigmoid(x), 0.0)
        x = load_columns(alpha + head, alpha_part_stride, row * alpha_row_stride, here, ALPHA_PARTS)
        rate = tl.load(decay_rate + head) * softplus(x + tl.load(decay_bias + head))
        total = tl.cumsum(tl.where(here, rate, 0.0), 0)
        tl.store(decay + head * chunks * _CHUNK + row, total)
        tl.store(steps + head * chunks * _CHUNK + row, step)
        difference = total[:, None] - total[None, :]
        left = tl.exp(tl.where(i[:, None] >= j, difference, float("-inf")))
        place = (head * chunks + chunk).to(tl.int64) * (_CHUNK * _CHUNK) + i[:, None] * _CHUNK + j
        tl.store(mixing + place, (products * left).to(mixing.dtype.element_ty))
        coupling = tl.where(i[:, None] > j, couplings * left * step[:, None], 0.0)
        tl.store(inverses + place, _invert(coupling, PRECISION))


@triton.jit(do_not_specialize=["rows", "chunks"])
def chain_chunks_kernel(
    queries, keys, values, decay, steps, inverses, mixing, memory, out, rows, chunks,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through all chunks with BLOCK value columns of one head's memory.

    Reads what the other kernels wrote; `out` `[rows, Hv, Dv]` is written, and if KEEP `memory`
    `[Hv, D, Dv]`. PRECISION is of products that the state depends on.
    """
    head = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    key_head = head % KEY_HEADS
    line = tl.arange(0, DIM)
    i = tl.arange(0, _CHUNK)
    memory_at = memory + (head * DIM + line[:, None]) * VALUE_DIM + column
    state = tl.load(memory_at)
    for chunk in range(chunks):
        row = i.to(tl.int64) + chunk * _CHUNK
        key_at = (row[:, None] * KEY_HEADS + key_head) * DIM + line[None, :]
        value_at = (row[:, None] * VALUE_HEADS + head) * VALUE_DIM + column
        place = (head * chunks + chunk).to(tl.int64) * (_CHUNK * _CHUNK)
        place += i[:, None] * _CHUNK + i[None, :]
        k = tl.load(keys + key_at)
        total = tl.load(decay + head * chunks * _CHUNK + row)
        last = tl.load(decay + (head * chunks + chunk) * _CHUNK + _CHUNK - 1)
        step = tl.load(steps + head * chunks * _CHUNK + row)
        left = tl.exp(total)[:, None]
        read = tl.dot(k, state, input_precision=PRECISION)
        target = (tl.load(values + value_at) - left * read) * step[:, None]
        correction = tl.dot(tl.load(inverses + place), target, input_precision=PRECISION)
        q = tl.load(queries + key_at)
        output = tl.dot(q, state.to(q.dtype), input_precision=PRECISION) * left
        mix = tl.load(mixing + place)
        output = tl.dot(mix, correction.to(mix.dtype), output, input_precision=PRECISION)
        tl.store(out + value_at, output.to(out.dtype.element_ty), mask=row[:, None] < rows)
        added = correction * tl.exp(last - total)[:, None]
        state = tl.dot(tl.trans(k), added, state * tl.exp(last), input_precision=PRECISION)
    if KEEP:
        tl.store(memory_at, state)
