"""Rows of a table of GGML blocks in plain Triton, some columns of a row a program."""

import triton
import triton.language as tl

from ragflash_kernels.dequant.kernel import unpack_values


@triton.jit(do_not_specialize=["row_bytes", "table_rows", "width"])
def gather_rows_kernel(
    table, token_ids, levels, out, row_bytes, table_rows, width, scale, FORMAT: tl.constexpr,
    ELEMENTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Unpack some columns of a token's row and multiply them; zeros for an id without a row.

    Args:
        table: Bytes `[table_rows, row_bytes]`.
        token_ids: Integers `[N]`.
        levels: Of IQ4, int8.
        out: float32 `[N, width]`.
        row_bytes: Of the table.
        table_rows: Of the table.
        width: Values in a row.
        scale: Factor of the values.
        FORMAT: Of the blocks.
        ELEMENTS: Values of a block.
        BLOCK_BYTES: Bytes of a block.
        COLUMNS: Of a program.
    """
    n = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(token_ids + n).to(tl.int64)
    known = (token >= 0) & (token < table_rows)
    row = table + tl.where(known, token, 0) * row_bytes
    inside = column < width
    block = row + column // ELEMENTS * BLOCK_BYTES
    value = unpack_values(block, column % ELEMENTS, levels, inside & known, FORMAT, ELEMENTS)
    at = n.to(tl.int64) * width + column
    tl.store(out + at, tl.where(known, value * scale, 0.0), mask=inside)
