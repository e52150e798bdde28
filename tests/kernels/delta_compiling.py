"""Compile the kernels of the gated delta rule: `python -m tests.kernels.delta_compiling …`.

Arguments and results as in `compiling`; sizes are those of a 27B hybrid.
"""

from collections.abc import Callable

from ragflash_kernels.gated_delta import kernel as rows_kernel
from ragflash_kernels.gated_delta.launch import COMMIT_BLOCK, TAIL_BLOCK, VALUE_BLOCK
from ragflash_kernels.gated_delta.prefill import kernel as chunks_kernel
from ragflash_kernels.gated_delta.prefill.launch import ROWS, pick_chain
from ragflash_kernels.gated_norm import kernel as norm_kernel
from tests.kernels.compiling import KERNELS, compile_kernel, main

SIZES = {"KEY_HEADS": 16, "VALUE_HEADS": 48, "DIM": 128, "VALUE_DIM": 128}
TABLES = dict.fromkeys(("first_rows", "slots", "counts", "parents", "path"), "*i32")


def floats(function, **others: str) -> dict[str, str]:
    """Types of a kernel's arguments: pointers, but for tables and sizes, are of float32."""
    small = {"rows", "chunks", "num_sequences", "num_slots"}
    names = [n for n in function.arg_names if n == n.lower() and n not in small | set(TABLES)]
    found = {name: "i32*16" if name.endswith("_stride") else "*fp32" for name in names}
    return found | {n: k for n, k in TABLES.items() if n in function.arg_names} | others


def delta_prepare_rows(sm: int, parts: str):
    constants = SIZES | {
        "QKV_PARTS": int(parts), "BETA_PARTS": int(parts), "ALPHA_PARTS": int(parts), "WIDTH": 4,
        "ROWS": 32, "SEQUENCES": 4, "HEADS": 64, "EAGER": sm >= 90,
    }  # fmt: skip
    function = rows_kernel.prepare_rows_kernel
    return compile_kernel(function, floats(function), constants, sm=sm, warps=1)


def delta_advance_rows(sm: int, rows: str):
    constants = SIZES | {"ROWS": int(rows), "BLOCK": VALUE_BLOCK, "EAGER": sm >= 90}
    function = rows_kernel.advance_rows_kernel
    return compile_kernel(function, floats(function), constants, sm=sm, warps=1)


def delta_commit(sm: int, rows: str):
    constants = SIZES | {
        "WIDTH": 4,
        "ROWS": int(rows),
        "BLOCK": COMMIT_BLOCK,
        "TAIL_BLOCK": TAIL_BLOCK,
    }
    function = rows_kernel.commit_kernel
    return compile_kernel(function, floats(function), constants, sm=sm, warps=4)


HALVES = dict.fromkeys(("queries", "keys", "inverses", "mixing"), "*bf16")


def delta_prepare_chunks(sm: int, dtype: str):
    constants = SIZES | {"PARTS": 1, "WIDTH": 4, "BLOCK": ROWS}
    function = chunks_kernel.prepare_chunks_kernel
    pointers = floats(function, qkv=f"*{dtype}", queries="*bf16", keys="*bf16")
    return compile_kernel(function, pointers, constants, sm=sm, warps=4)


def delta_solve_chunks(sm: int, dtype: str):
    constants = SIZES | {"BETA_PARTS": 1, "ALPHA_PARTS": 1}
    function = chunks_kernel.solve_chunks_kernel
    pointers = floats(function, beta=f"*{dtype}", alpha=f"*{dtype}", **HALVES)
    return compile_kernel(function, pointers, constants, sm=sm, warps=4)


def delta_chain_chunks(sm: int, dtype: str):
    options = pick_chain(SIZES["VALUE_DIM"], hopper=sm == 90)
    constants = SIZES | {"BLOCK": options.value_block, "KEEP": True}
    function = chunks_kernel.chain_chunks_kernel
    pointers = floats(function, out=f"*{dtype}", **HALVES)
    return compile_kernel(
        function, pointers, constants, sm=sm, warps=options.warps, stages=options.stages
    )


def gated_norm(sm: int, dtype: str):
    """On the grid for float32, otherwise rounded."""
    quantized = dtype == "fp32"
    constants = {"PARTS": 7 if quantized else 1, "DIM": 128, "QUANTIZED": quantized}
    pointers = {
        "o": f"*{dtype}", "gate": f"*{dtype}", "weight": "*fp32", "scales_out": "*fp32",
        "sums_out": "*fp32", "out": "*i8" if quantized else f"*{dtype}", "eps": "fp32",
    }  # fmt: skip
    function = norm_kernel.gated_norm_kernel
    return compile_kernel(function, pointers, constants | {"EAGER": sm >= 90}, sm=sm, warps=1)


DELTA_KERNELS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        delta_prepare_rows, delta_advance_rows, delta_commit, delta_prepare_chunks,
        delta_solve_chunks, delta_chain_chunks, gated_norm,
    )
}  # fmt: skip

if __name__ == "__main__":
    KERNELS.update(DELTA_KERNELS)
    main()
