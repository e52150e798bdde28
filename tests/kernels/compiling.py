"""Compile kernels for cards that are not here: `python -m tests.kernels.compiling KERNEL:sm …`.

Prints a line of JSON for each: registers and stack bytes of a thread (a stack means that registers
were spilled), shared memory of a program. Needs no card and no interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from ragflash_kernels.embedding import kernel as embedding_kernel
from ragflash_kernels.gated_ffn import kernel as gated_kernel
from ragflash_kernels.kv_codec import kernel as kv_kernel
from ragflash_kernels.kv_codec.formats import (
    KvFormat,
    page_layout,
    rotation_group,
    scale_block,
)
from ragflash_kernels.qmatmul import gluon_kernel, kernel
from ragflash_kernels.qmatmul.formats import RECORD_FORMATS
from ragflash_kernels.qmatmul.launch import pick_registers, record_constants, sign_bit
from ragflash_kernels.quant_layout import BLOCK_FORMATS
from ragflash_kernels.rms_norm import kernel as norm_kernel
from ragflash_kernels.sample import kernel as sample_kernel
from ragflash_kernels.token_moves import kernel as move_kernel


def compile_kernel(
    function, pointers, constants, *, sm: int, warps: int, stages=None, registers=None
):
    """Compile a jit function; arguments that are neither named nor constants are int32.

    Pointers are multiples of 16, and integers that are named "i32*16".
    """
    names = function.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32").removesuffix("*16")
        for name in names
    }
    source = GluonASTSource if function.is_gluon() else ASTSource
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in pointers.items()
        if "*" in kind
    }
    options = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
    options |= {"num_stages": stages} if stages else {}
    return triton.compile(
        source(
            function,
            signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs=aligned,
        ),
        target=GPUTarget("cuda", sm, 32),
        options=options,
    )


def qmatmul(sm: int, name: str, rows: str, *, staged=False):
    """The Gluon kernel of a format for so many rows."""
    num_rows = int(rows)
    layout = RECORD_FORMATS[name]
    warps = 2 if staged and layout.high_bits == 2 else 4
    constants = record_constants(layout, layout.max_steps) | {
        "TILES": -(-num_rows // 8), "ONE": num_rows == 1, "WARPS": warps, "PREFETCH": not staged,
        "STAGED": staged, "EAGER": sm >= 90 and num_rows <= 16,
    }  # fmt: skip
    pointers = {"records": "*u8", "q": "*i32", "scales": "*fp32", "sums": "*fp32", "out": "*fp32"}
    limit = pick_registers(layout, num_rows) if sm == 90 and not staged else None
    return compile_kernel(
        gluon_kernel.qmatmul_gluon_kernel, pointers, constants, sm=sm, warps=warps, registers=limit
    )


def qmatmul_staged(sm: int, name: str, rows: str):
    """The same with records copied into shared memory ahead."""
    return qmatmul(sm, name, rows, staged=True)


def qmatmul_plain(sm: int, name: str, rows: str):
    """The plain Triton kernel of a format for so many rows, 16 or 32."""
    layout = RECORD_FORMATS[name]
    constants = record_constants(layout, layout.max_steps) | {
        "SIGN": sign_bit(layout), "M": int(rows),
    }  # fmt: skip
    pointers = {
        "records": "*u8", "levels": "*i8", "q": "*i8",
        "scales": "*fp32", "sums": "*fp32", "out": "*fp32",
    }  # fmt: skip
    return compile_kernel(kernel.qmatmul_kernel, pointers, constants, sm=sm, warps=1)


def dense(sm: int, dtype: str, rows: str):
    """The product with a matrix of floats of so many rows, 16 or 32."""
    constants = {"M": int(rows), "WIDTH": 32, "EAGER": sm >= 90}
    pointers = {
        "weight": f"*{dtype}", "q": "*i8", "scales": "*fp32", "out": "*fp32", "columns": "i32*16",
    }  # fmt: skip
    return compile_kernel(kernel.dense_kernel, pointers, constants, sm=sm, warps=2)


def unpack(sm: int, name: str, dtype: str):
    """The unpacking of a format into a dtype."""
    layout = RECORD_FORMATS[name]
    constants = record_constants(layout, layout.max_steps) | {"SIGN": sign_bit(layout)}
    pointers = {"records": "*u8", "levels": "*i8", "out": f"*{dtype}"}
    return compile_kernel(kernel.unpack_kernel, pointers, constants, sm=sm, warps=1)


def unpack_gluon(sm: int, name: str, dtype: str):
    """The same by the Gluon kernel, into bf16 or fp16."""
    layout = RECORD_FORMATS[name]
    constants = record_constants(layout, layout.max_steps) | {
        "WARPS": 4, "BFLOAT16": dtype == "bf16",
    }  # fmt: skip
    pointers = {"records": "*u8", "out": f"*{dtype}"}
    return compile_kernel(gluon_kernel.unpack_gluon_kernel, pointers, constants, sm=sm, warps=4)


def add_norm(sm: int, kind: str):
    """The fused norm of rows of 5,120, of twelve parts onto the grid ("grid") or of one."""
    quantized = kind == "grid"
    constants = {
        "PARTS": 12 if quantized else 1, "POST": True, "QUANTIZED": quantized, "STEPS": 256,
        "EAGER": sm >= 90,
    }  # fmt: skip
    pointers = {
        "delta": "*fp32" if quantized else "*bf16", "residual": "*fp32", "weight": "*fp32",
        "post_weight": "*fp32", "out": "*i8" if quantized else "*bf16", "scales_out": "*fp32",
        "sums_out": "*fp32", "eps": "fp32", "delta_scale": "fp32", "residual_scale": "fp32",
        "part_stride": "i32*16", "row_stride": "i32*16", "width": "i32*16",
    }  # fmt: skip
    return compile_kernel(norm_kernel.add_norm_kernel, pointers, constants, sm=sm, warps=16)


def add_parts(sm: int):
    """The sum of twelve parts into 256 columns of a row."""
    constants = {"PARTS": 12, "BLOCK": 256, "EAGER": sm >= 90}
    pointers = {
        "delta": "*fp32", "residual": "*fp32", "squares": "*fp32", "delta_scale": "fp32",
        "residual_scale": "fp32", "part_stride": "i32*16", "row_stride": "i32*16",
        "width": "i32*16",
    }  # fmt: skip
    return compile_kernel(norm_kernel.add_parts_kernel, pointers, constants, sm=sm, warps=2)


def norm_parts(sm: int):
    """The norm of 256 columns of a row."""
    constants = {"BLOCKS": 32, "EAGER": sm >= 90}
    pointers = {
        "residual": "*fp32", "squares": "*fp32", "weight": "*fp32", "out": "*i8",
        "scales_out": "*fp32", "sums_out": "*fp32", "eps": "fp32", "width": "i32*16",
    }  # fmt: skip
    return compile_kernel(norm_kernel.norm_parts_kernel, pointers, constants, sm=sm, warps=1)


def gated(sm: int, kind: str):
    """The gate of seven parts onto the grid ("grid") or of one."""
    quantized = kind == "grid"
    parts = 7 if quantized else 1
    constants = {
        "GATE_PARTS": parts, "UP_PARTS": parts, "GELU": True, "QUANTIZED": quantized,
        "STEPS": 8 if quantized else 64, "EAGER": sm >= 90,
    }  # fmt: skip
    strides = ("gate_part_stride", "gate_row_stride", "up_part_stride", "up_row_stride", "width")
    product = "*fp32" if quantized else "*bf16"
    pointers = dict.fromkeys(strides, "i32*16") | {
        "gate": product, "up": product, "out": "*i8" if quantized else "*bf16",
        "scales_out": "*fp32", "sums_out": "*fp32",
    }  # fmt: skip
    warps = 1 if quantized else 8
    return compile_kernel(gated_kernel.gated_kernel, pointers, constants, sm=sm, warps=warps)


def quantize(sm: int, dtype: str):
    """The quantiser of activations of a dtype."""
    pointers = {"x": f"*{dtype}", "q_out": "*i8", "scales_out": "*fp32", "sums_out": "*fp32"}
    return compile_kernel(
        kernel.quantize_rows_kernel, pointers, {"EAGER": sm >= 90}, sm=sm, warps=1
    )


def encode(sm: int, kv_format: str, head_dim: str):
    """The encoder of pages of a format."""
    fmt, dim = KvFormat(kv_format), int(head_dim)
    layout, group = page_layout(fmt, 256, dim), rotation_group(dim)
    constants = {
        "DIM": dim, "GROUP": group, "STAGES": group.bit_length() - 1 if fmt.rotated else 0,
        "BLOCK": scale_block(fmt, dim), "TOKENS": 8, "SIZE": layout.size, "HIGH": layout.high,
        "SCALES": layout.scales, "BITS": 8 if fmt is KvFormat.Q8_0 else 4,
        "LEVELS": {KvFormat.TQ3_0: 4, KvFormat.TQ4: 8}.get(fmt, 0), "VALUE_TILES": 0,
        "HAS_OFFSETS": True,
    }  # fmt: skip
    pointers = {
        "x": "*fp16", "offsets": "*fp32", "first": "*fp32", "last": "*fp32", "out": "*u8",
        "root": "fp32",
    }  # fmt: skip
    return compile_kernel(kv_kernel.encode_kernel, pointers, constants, sm=sm, warps=4)


def move_tokens(sm: int, dtype: str):
    """The copy of tokens of pages of a dtype."""
    pointers = {"pages": f"*{dtype}", "starts": "*i32", "strides": "*i32", "moves": "*i64"}
    function = move_kernel.move_tokens_kernel
    return compile_kernel(function, pointers, {"BLOCK": 512}, sm=sm, warps=4)


def gather_rows(sm: int, name: str):
    """Token vectors of a format."""
    sizes = BLOCK_FORMATS[name]
    constants = {
        "FORMAT": name, "ELEMENTS": sizes.elements_per_block,
        "BLOCK_BYTES": sizes.bytes_per_block, "COLUMNS": 256,
    }  # fmt: skip
    pointers = {
        "table": "*u8", "token_ids": "*i64", "levels": "*i8", "out": "*fp32", "scale": "fp32",
    }  # fmt: skip
    return compile_kernel(embedding_kernel.gather_rows_kernel, pointers, constants, sm=sm, warps=4)


def largest(sm: int):
    """The first stage of the search for the largest logit."""
    pointers = {"logits": "*fp32", "tops": "*fp32", "places": "*i32"}
    constants = {"CHUNK": 2048, "EAGER": sm >= 90}
    return compile_kernel(
        sample_kernel.largest_of_chunks_kernel, pointers, constants, sm=sm, warps=4
    )


KERNELS: dict[str, Callable] = {
    "qmatmul": qmatmul,
    "qmatmul_staged": qmatmul_staged,
    "qmatmul_plain": qmatmul_plain,
    "quantize": quantize,
    "dense": dense,
    "unpack": unpack,
    "unpack_gluon": unpack_gluon,
    "add_norm": add_norm,
    "add_parts": add_parts,
    "norm_parts": norm_parts,
    "gated": gated,
    "gather_rows": gather_rows,
    "move_tokens": move_tokens,
    "encode": encode,
    "largest": largest,
}


def measure(compiled) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(re.search(rf"\b{key}:(\d+)", report)[1]) for key in ("REG", "STACK")}
    return {
        "registers": found["REG"], "stack": found["STACK"], "shared": compiled.metadata.shared
    }  # fmt: skip


def main() -> None:
    for argument in sys.argv[1:]:
        name, *parameters, sm = argument.split(":")
        result = measure(KERNELS[name](int(sm), *parameters))
        print(json.dumps({"kernel": argument, **result}), flush=True)


if __name__ == "__main__":
    main()
