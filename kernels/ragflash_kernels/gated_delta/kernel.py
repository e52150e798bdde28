"""A few rows of several sequences in Triton: what they read, and what they would write.

A row's result is the same, bit for bit, however many rows come after it, whether rows that are not
before it on its path stand between, and the same again when the rows before it have been committed:
sums are taken in one order, and `commit_kernel` changes a memory by the operations by which
`advance_rows_kernel` went past it, and by which that goes back to where a branch begins.
"""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns
from ragflash_kernels.conv1d.kernel import convolve

_EPS = tl.constexpr(1e-6)  # of the squared length of queries and keys


@triton.jit
def to_length_1(x):
    """Scale the rows of `[R, D]`."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + _EPS)[:, None]


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))`, exact to the last digits where that is next to 0."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    # The logarithm of the rounded sum, corrected for the rounding.
    log = tl.log(rounded) * (small / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
    return tl.maximum(x, 0.0) + tl.where(rounded == 1.0, small, log)


@triton.jit
def _prefetch(address):
    """Ask the second-level cache for the line of each address."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _find_sequence(first_rows, slots, row, num_sequences, SEQUENCES: tl.constexpr):
    """Return the first row of a row's sequence, the end of the last sequence, and the slot."""
    number = tl.arange(0, SEQUENCES)
    ends = tl.load(first_rows + 1 + number, mask=number < num_sequences, other=row + 1)
    sequence = tl.minimum(tl.sum((ends <= row).to(tl.int32), 0), num_sequences - 1)
    end = tl.load(first_rows + num_sequences)
    return tl.load(first_rows + sequence), end, tl.load(slots + sequence).to(tl.int64)


@triton.jit
def _convolve_row(
    qkv, part_stride, row_stride, tails, tape_inputs, conv, row, first, end, parents, slot, channel,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return `[1, C]` channels of a row, zeros from row `end` on, and write their inputs."""
    rows = tl.zeros((1, 1), tl.int64) + row
    tail = tails + slot * (WIDTH - 1) * CHANNELS
    x, inputs = convolve(
        qkv, part_stride, row_stride, tail, conv, rows, first, parents, channel, rows < end,
        CHANNELS, PARTS, WIDTH,
    )  # fmt: skip
    place = slot * ROWS + row - first
    tl.store(tape_inputs + place * CHANNELS + channel, inputs, mask=(rows < end) & (channel >= 0))
    return x


@triton.jit(do_not_specialize=["num_sequences"])
def prepare_rows_kernel(
    qkv, beta, alpha, conv, decay_rate, decay_bias, tails, tape_inputs, tape_keys, tape_decay,
    first_rows, slots, parents, queries, values, steps, out, qkv_part_stride, qkv_row_stride,
    beta_part_stride, beta_row_stride, alpha_part_stride, alpha_row_stride, num_sequences,
    QKV_PARTS: tl.constexpr, BETA_PARTS: tl.constexpr, ALPHA_PARTS: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr,
    HEADS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Convolve one head of one row, or turn a row's gates into steps and factors of decay.

    `tails` and the tapes are `DeltaStates` of a layer, the rest as in `delta_step`. Written are the
    tapes, `queries` `[N, Hk, D]`, `values` `[N, Hv, Dv]`, `steps` `[N, Hv]`, and zeros in `out` of
    rows of no sequence. SEQUENCES and HEADS are powers of two, at least S and Hv. If EAGER, the
    weights are on their way to the second-level cache before the previous kernel has ended.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    channels: tl.constexpr = 2 * KEY_HEADS * DIM + VALUE_HEADS * VALUE_DIM
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        values_before = tl.maximum(head - 2 * KEY_HEADS, 0) * VALUE_DIM
        channel = tl.minimum(head, 2 * KEY_HEADS) * DIM + values_before + tl.arange(0, DIM)
        _prefetch(conv + tl.minimum(channel, channels - 1) * WIDTH)
        tl.extra.cuda.gdc_wait()
    first, end, slot = _find_sequence(first_rows, slots, row, num_sequences, SEQUENCES)
    place = slot * ROWS + row - first
    if head < 2 * KEY_HEADS:
        line = tl.arange(0, DIM)[None, :]
        key = to_length_1(_convolve_row(
            qkv, qkv_part_stride, qkv_row_stride, tails, tape_inputs, conv, row, first, end,
            parents, slot, head * DIM + line, QKV_PARTS, channels, WIDTH, ROWS,
        ))  # fmt: skip
        if head < KEY_HEADS:
            tl.store(queries + (row * KEY_HEADS + head) * DIM + line, key * DIM**-0.5)
        else:
            key_at = (place * KEY_HEADS + head - KEY_HEADS) * DIM + line
            tl.store(tape_keys + key_at, key, mask=(row < end) & (line >= 0))
    elif head < 2 * KEY_HEADS + VALUE_HEADS:
        column = (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)[None, :]
        value = _convolve_row(
            qkv, qkv_part_stride, qkv_row_stride, tails, tape_inputs, conv, row, first, end,
            parents, slot, 2 * KEY_HEADS * DIM + column, QKV_PARTS, channels, WIDTH, ROWS,
        )  # fmt: skip
        value_at = row * (VALUE_HEADS * VALUE_DIM) + column
        tl.store(values + value_at, value)
        tl.store(out + value_at, value, mask=(row >= end) & (column >= 0))
    else:
        gate = tl.arange(0, HEADS)
        mask = gate < VALUE_HEADS
        beta_at = gate + row.to(tl.int64) * beta_row_stride
        step = tl.sigmoid(load_columns(beta, beta_part_stride, beta_at, mask, BETA_PARTS))
        tl.store(steps + row * VALUE_HEADS + gate, step, mask=mask)
        alpha_at = gate + row.to(tl.int64) * alpha_row_stride
        x = load_columns(alpha, alpha_part_stride, alpha_at, mask, ALPHA_PARTS)
        x += tl.load(decay_bias + gate, mask=mask, other=0.0)
        decay = tl.exp(tl.load(decay_rate + gate, mask=mask, other=0.0) * softplus(x))
        tl.store(tape_decay + place * VALUE_HEADS + gate, decay, mask=mask & (row < end))


@triton.jit
def _load_row(
    queries, values, steps, tape_keys, tape_decay, row, place, here, head, line, column,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return a row's key, query, value, factor of decay and step, zeros unless it is here."""
    key_head = head % KEY_HEADS
    key_at = (place * KEY_HEADS + key_head) * DIM + line
    query_at = (row * KEY_HEADS + key_head) * DIM + line
    value_at = (row * VALUE_HEADS + head) * VALUE_DIM + column
    key = tl.load(tape_keys + key_at, mask=here & (line >= 0), other=0.0)
    query = tl.load(queries + query_at, mask=here & (line >= 0), other=0.0)
    value = tl.load(values + value_at, mask=here & (column >= 0), other=0.0)
    decay = tl.load(tape_decay + place * VALUE_HEADS + head, mask=here, other=0.0)
    step = tl.load(steps + row * VALUE_HEADS + head, mask=here, other=0.0)
    return key[:, None], query[:, None], value, decay, step


@triton.jit
def _apply_row(
    memory, tape_keys, tape_corrections, tape_decay, place, head, line, column,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return columns of a head's memory after a row of a tape."""
    key = tl.load(tape_keys + (place * KEY_HEADS + head % KEY_HEADS) * DIM + line)
    at = (place * VALUE_HEADS + head) * VALUE_DIM + column
    correction = tl.load(tape_corrections + at)
    memory *= tl.load(tape_decay + place * VALUE_HEADS + head)
    return tl.fma(key[:, None], correction[None, :], memory)


@triton.jit
def _branch_off(
    memory_at, tape_keys, tape_corrections, tape_decay, parents, first, parent, place, head, line,
    column, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return columns of a head's memory after row `parent` and those before it on its path.

    `place` is that of the sequence's first row in the tape.
    """
    tl.debug_barrier()  # what other threads wrote to the tape is read
    word = tl.zeros((), tl.int64)
    last = parent
    while last >= 0:
        word |= tl.full((), 1, tl.int64) << last
        last = tl.load(parents + first + last)
    memory = tl.load(memory_at)
    for row in range(parent + 1):
        if (word >> row) & 1 == 1:
            memory = _apply_row(
                memory, tape_keys, tape_corrections, tape_decay, place + row, head, line, column,
                KEY_HEADS, VALUE_HEADS, DIM, VALUE_DIM,
            )  # fmt: skip
    return memory


@triton.jit
def advance_rows_kernel(
    queries, values, steps, tape_keys, tape_corrections, tape_decay, memories, first_rows, slots,
    parents, out, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Take a sequence's rows past BLOCK value columns of one head's memory, which is kept as it is.

    Arguments as in `prepare_rows_kernel`; `out` and `tape_corrections` are written. If EAGER, the
    memory is on its way to the second-level cache before the previous kernel has ended.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    line = tl.arange(0, DIM)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + sequence).to(tl.int64)
    memory_at = memories + (slot * VALUE_HEADS + head) * (DIM * VALUE_DIM)
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch(memory_at + line * VALUE_DIM + tl.program_id(2) * BLOCK)
        tl.extra.cuda.gdc_wait()
    first = tl.load(first_rows + sequence)
    end = tl.load(first_rows + sequence + 1)
    memory_at += line[:, None] * VALUE_DIM + column[None, :]
    memory = tl.load(
        memory_at, mask=(first < end) & (line[:, None] >= 0) & (column >= 0), other=0.0
    )
    place = slot * ROWS
    key, query, value, decay, step = _load_row(
        queries, values, steps, tape_keys, tape_decay, first, place, first < end, head, line,
        column, KEY_HEADS, VALUE_HEADS, DIM, VALUE_DIM,
    )  # fmt: skip
    for row in range(first, end):
        next_key, next_query, next_value, next_decay, next_step = _load_row(
            queries, values, steps, tape_keys, tape_decay, row + 1, place + 1, row + 1 < end, head,
            line, column, KEY_HEADS, VALUE_HEADS, DIM, VALUE_DIM,
        )  # fmt: skip
        if parents is not None:
            parent = tl.load(parents + row)
            if parent != row - first - 1:
                memory = _branch_off(
                    memory_at, tape_keys, tape_corrections, tape_decay, parents, first, parent,
                    slot * ROWS, head, line, column, KEY_HEADS, VALUE_HEADS, DIM, VALUE_DIM,
                )  # fmt: skip
        memory *= decay
        correction = (value - tl.sum(memory * key, 0)) * step
        # The output before the correction and what that adds: two sums that wait for nothing.
        output = tl.sum(memory * query, 0) + correction * tl.sum(key * query, 0)
        memory = tl.fma(key, correction[None, :], memory)
        at = head * VALUE_DIM + column
        tl.store(tape_corrections + place * (VALUE_HEADS * VALUE_DIM) + at, correction)
        tl.store(out + row * (VALUE_HEADS * VALUE_DIM) + at, output)
        key, query, value, decay, step = next_key, next_query, next_value, next_decay, next_step
        place += 1


@triton.jit(do_not_specialize=["num_slots", "path_stride"])
def commit_kernel(
    memories, tails, tape_inputs, tape_keys, tape_corrections, tape_decay, slots, counts, path,
    path_stride, num_slots, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply `counts` rows of a tape to BLOCK columns of a memory, or to part of a tail.

    `memories`, `tails` and the tapes are `DeltaStates` of all layers, with `num_slots`; a program
    of a tail has TAIL_BLOCK channels. `path` has the rows, or is None for the first ones.
    """
    sequence = tl.program_id(0)
    part = tl.program_id(2)
    channels: tl.constexpr = 2 * KEY_HEADS * DIM + VALUE_HEADS * VALUE_DIM
    memory_parts: tl.constexpr = VALUE_HEADS * (VALUE_DIM // BLOCK)
    count = tl.load(counts + sequence)
    state = tl.program_id(1) * num_slots + tl.load(slots + sequence).to(tl.int64)
    if (part < memory_parts) & (count > 0):
        head = part // (VALUE_DIM // BLOCK)
        column = part % (VALUE_DIM // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        line = tl.arange(0, DIM)
        memory_at = memories + (state * VALUE_HEADS + head) * (DIM * VALUE_DIM)
        memory_at += line[:, None] * VALUE_DIM + column[None, :]
        memory = tl.load(memory_at)
        for index in range(count):
            row = index if path is None else tl.load(path + sequence * path_stride + index)
            memory = _apply_row(
                memory, tape_keys, tape_corrections, tape_decay, state * ROWS + row, head, line,
                column, KEY_HEADS, VALUE_HEADS, DIM, VALUE_DIM,
            )  # fmt: skip
        tl.store(memory_at, memory)
    if (part >= memory_parts) & (count > 0):
        channel = (part - memory_parts) * TAIL_BLOCK + tl.arange(0, TAIL_BLOCK)
        mask = channel < channels
        tail = tails + state * (WIDTH - 1) * channels + channel
        for tap in tl.static_range(WIDTH - 1):  # the oldest first: later ones are still to be read
            index = count + tap - (WIDTH - 1)
            row = index
            if path is not None:
                row = tl.load(path + sequence * path_stride + index, mask=index >= 0, other=0)
            at = (state * ROWS + row) * channels + channel
            kept = tl.load(tail + (count + tap) * channels, mask=mask & (index < 0), other=0.0)
            kept += tl.load(tape_inputs + at, mask=mask & (index >= 0), other=0.0)
            tl.store(tail + tap * channels, kept, mask=mask)
