"""Compile the kernels of the gated delta rule: `python -m tests.kernels.delta_compiling …`.

Arguments and results as in `compiling`; sizes are those of a 27B hybrid.
"""

from collections.abc import Callable

from ragflash_kernels.gated_delta import kernel as rows_kernel
from ragflash_kernels.gated_delta.launch import COMMIT_BLOCK, TAIL_BLOCK, VALUE_BLOCK
from ragflash_kernels.gated_delta.prefill import kernel as chunks_kernel
from ragflash_kernels.gated_delta.prefill.launch import ROWS
from tests.kernels.compiling import KERNELS, compile_kernel, main

SIZES = {"KEY_HEADS": 16, "VALUE_HEADS": 48, "DIM": 128, "VALUE_DIM": 128}
TABLES = dict.fromkeys(("first_rows", "slots", "counts"), "*i32")


def floats(function, **others: str) -> dict[str, str]:
    """Pointers of a kernel: all but tables and sizes are float32."""
    small = {"rows", "chunks", "num_sequences", "num_slots"}
    names = [n for n in function.arg_names if n == n.lower() and n not in small | set(TABLES)]
    found = {name: "*fp32" for name in names if not name.endswith("_stride")}
    return found | {n: k for n, k in TABLES.items() if n in function.arg_names} | others


def delta_prepare_rows(sm: int, parts: str):
    constants = SIZES | {
        "QKV_PARTS": int(parts), "BETA_PARTS": int(parts), "ALPHA_PARTS": int(parts), "WIDTH": 4,
        "ROWS": 32, "SEQUENCES": 4, "HEADS": 64, "EAGER": sm >= 90,
    }  # fmt: skip
    function = rows_kernel.prepare_rows_kernel
    return compile_kernel(function, floats(function), constants, sm=sm, warps=1)


def delta_advance_rows(sm: int, block: str = str(VALUE_BLOCK), warps: str = "1"):
    constants = SIZES | {"ROWS": 32, "BLOCK": int(block), "EAGER": sm >= 90}
    function = rows_kernel.advance_rows_kernel
    return compile_kernel(function, floats(function), constants, sm=sm, warps=int(warps))


def delta_commit(sm: int):
    constants = SIZES | {"WIDTH": 4, "ROWS": 32, "BLOCK": COMMIT_BLOCK, "TAIL_BLOCK": TAIL_BLOCK}
    function = rows_kernel.commit_kernel
    return compile_kernel(function, floats(function), constants, sm=sm, warps=4)


HALVES = dict.fromkeys(("queries", "keys", "inverses", "mixing"), "*bf16")


def delta_prepare_chunks(sm: int, dtype: str):
    constants = SIZES | {"PARTS": 1, "WIDTH": 4, "BLOCK": ROWS}
    function = chunks_kernel.prepare_chunks_kernel
    pointers = floats(function, qkv=f"*{dtype}", queries="*bf16", keys="*bf16")
    return compile_kernel(function, pointers, constants, sm=sm, warps=4)


def delta_solve_chunks(sm: int, dtype: str, warps: str = "4"):
    constants = SIZES | {"BETA_PARTS": 1, "ALPHA_PARTS": 1}
    function = chunks_kernel.solve_chunks_kernel
    pointers = floats(function, beta=f"*{dtype}", alpha=f"*{dtype}", **HALVES)
    return compile_kernel(function, pointers, constants, sm=sm, warps=int(warps))


def delta_chain_chunks(
    sm: int, dtype: str, block: str = "32", warps: str = "4", stages: str = "1"
):  # fmt: skip
    constants = SIZES | {"BLOCK": int(block), "KEEP": True}
    function = chunks_kernel.chain_chunks_kernel
    pointers = floats(function, out=f"*{dtype}", **HALVES)
    return compile_kernel(
        function, pointers, constants, sm=sm, warps=int(warps), stages=int(stages)
    )


DELTA_KERNELS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        delta_prepare_rows, delta_advance_rows, delta_commit, delta_prepare_chunks,
        delta_solve_chunks, delta_chain_chunks,
    )
}  # fmt: skip

if __name__ == "__main__":
    KERNELS.update(DELTA_KERNELS)
    main()
