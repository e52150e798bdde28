"""Compile the kernels of attention: `python -m tests.kernels.attention_compiling NAME:…:SM`.

See `compiling`.
"""

from collections.abc import Callable

from ragflash_kernels.attention_inputs import kernel as inputs_kernel
from ragflash_kernels.chunk_attention import kernel as chunk_kernel
from ragflash_kernels.chunk_attention.launch import tile_for
from ragflash_kernels.kv_codec.formats import KvFormat, page_layout, value_tiles
from ragflash_kernels.paged_attention import gluon_kernel as tq3_kernel
from ragflash_kernels.paged_attention import kernel as attention_kernel
from ragflash_kernels.paged_attention import query_kernel
from ragflash_kernels.paged_attention.gluon_tq3 import pick_registers, program_constants
from ragflash_kernels.paged_attention.launch import pick_tile
from ragflash_kernels.prefill_attention import kernel as prefill_kernel
from ragflash_kernels.prefill_attention.launch import pick_tile as pick_prefill_tile
from ragflash_kernels.prefill_attention.unpack import kernel as unpack_kernels
from ragflash_kernels.prefill_attention.unpack.launch import TOKENS as UNPACKED_TOKENS
from tests.kernels.compiling import KERNELS, compile_kernel, main


def attend(sm: int, kv_format: str, head_dim: str, query_rows: str):
    """Attention of so many query rows over pages of 256 tokens."""
    fmt, dim = KvFormat(kv_format), int(head_dim)
    size = page_layout(fmt, 256, dim).size
    tile = pick_tile(fmt, dim, 256, int(query_rows), large=sm in (80, 90))
    constants = {
        "DIM": dim, "PAGE": 256, "KEY_BYTES": size, "VALUE_BYTES": size, "KEY_STRIDE": 128 * size,
        "VALUE_STRIDE": 128 * size, "KEY_FORMAT": list(KvFormat).index(fmt),
        "VALUE_FORMAT": list(KvFormat).index(fmt), "M": tile.query_rows, "N": tile.tokens,
        "PTX": True, "EAGER": sm >= 90,
    }  # fmt: skip
    whole = ("page_table", "first_rows", "starts", "ends", "words")
    pointers = dict.fromkeys(whole, "*i32") | {
        "q": "*fp16", "keys": "*u8", "values": "*u8", "out": "*fp32", "lse": "*fp32",
        "scale": "fp32",
    }  # fmt: skip
    return compile_kernel(
        attention_kernel.attend_kernel, pointers, constants, sm=sm, warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip


def attend_tq3(sm: int, head_dim: str, tiles: str):
    """Attention over TQ3_0 pages of 256 tokens, of so many tiles of eight queries."""
    dim, count = int(head_dim), int(tiles)
    layout = page_layout(KvFormat.TQ3_0, 256, dim)
    constants = {
        "DIM": dim, "PAGE": 256, "HIGH": layout.high, "SCALES": layout.scales,
        "SIZE": layout.size, "EAGER": sm >= 90, **program_constants(dim, count),
    }  # fmt: skip
    whole = ("bounds", "page_table", "first_rows", "starts", "ends")
    pointers = dict.fromkeys(whole, "*i32") | {
        "q": "*i8", "scales": "*fp32", "keys": "*u8", "values": "*u8", "out": "*fp32",
        "lse": "*fp32",
    }  # fmt: skip
    return compile_kernel(
        tq3_kernel.attend_tq3_kernel, pointers, constants, sm=sm, warps=dim // 32,
        registers=pick_registers(count),
    )  # fmt: skip


def quantize_queries(sm: int, head_dim: str):
    """Rotation and quantisation of queries."""
    constants = {"DIM": int(head_dim), "ROTATE": True, "EAGER": sm >= 90}
    pointers = dict.fromkeys(("first_rows", "starts", "bounds_out"), "*i32") | {
        "q": "*fp16", "first": "*fp32", "last": "*fp32", "q_out": "*i8", "scales_out": "*fp32",
        "factor": "fp32", "root": "fp32",
    }  # fmt: skip
    return compile_kernel(query_kernel.quantize_queries_kernel, pointers, constants, sm=sm, warps=1)


def merge_parts(sm: int, kind: str, head_dim: str):
    """The sum of 64 splits of exact pages and 512 of packed ones, onto the grid or into rows."""
    dim, quantized = int(head_dim), kind == "grid"
    constants = {
        "DIM": dim, "WIDTH": min(dim, 128), "EXACT_SPLITS": 64, "PACKED_SPLITS": 512, "CHUNK": 32,
        "ROTATED": True, "GATE_PARTS": 7 if quantized else 1, "QUANTIZED": quantized,
        "EAGER": sm >= 90,
    }  # fmt: skip
    of_parts = ("exact", "exact_lse", "packed", "packed_lse")
    pointers = dict.fromkeys((*of_parts, "first", "last", "scales_out", "sums_out"), "*fp32") | {
        "gate": "*fp32" if quantized else "*bf16", "out": "*i8" if quantized else "*bf16",
        "root": "fp32",
    }  # fmt: skip
    return compile_kernel(attention_kernel.merge_parts_kernel, pointers, constants, sm=sm, warps=4)


def attention_inputs(sm: int, dtype: str, head_dim: str):
    """Norms, rotation of a quarter and writing, of products in seven parts or in one."""
    dim = int(head_dim)
    parts = 7 if dtype == "fp32" else 1
    constants = {
        "PAGE": 256, "DIM": dim, "HALF": dim // 8, "Q_PARTS": parts, "K_PARTS": parts,
        "V_PARTS": parts, "Q_NORM": True, "K_NORM": True, "EAGER": sm >= 90,
    }  # fmt: skip
    pointers = dict.fromkeys(("q", "k", "v"), f"*{dtype}") | {
        "q_norm": "*fp32", "k_norm": "*fp32", "cos": "*fp32", "sin": "*fp32", "eps": "fp32",
        "row_pages": "*i32", "row_places": "*i32", "keys": "*fp16", "values": "*fp16",
        "q_out": "*fp16",
    }  # fmt: skip
    return compile_kernel(
        inputs_kernel.attention_inputs_kernel, pointers, constants,
        sm=sm, warps=1 if dim <= 64 else 2,
    )  # fmt: skip


def attend_many(sm: int, head_dim: str, mask: str):
    """Attention of the rows of a chunk; mask: none, causal or window."""
    dim = int(head_dim)
    tile = pick_prefill_tile(dim, large=sm == 90)
    constants = {
        "DIM": dim, "M": tile.rows, "N": tile.tokens, "CAUSAL": mask != "none",
        "WINDOWED": mask == "window",
    }  # fmt: skip
    pointers = dict.fromkeys(("q", "keys", "values", "out"), "*fp16") | {
        "lse": "*fp32", "scale": "fp32",
    }  # fmt: skip
    return compile_kernel(
        prefill_kernel.attend_kernel, pointers, constants, sm=sm, warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip


def chunk_attention(sm: int, head_dim: str, mask: str, query_rows: str):
    """Attention of a chunk over its pages of 256 tokens; mask: causal or window."""
    dim = int(head_dim)
    tile = tile_for(int(query_rows), dim, large=sm == 90)
    constants = {
        "DIM": dim, "PAGE": 256, "M": tile.rows, "N": tile.tokens, "WINDOWED": mask == "window",
    }  # fmt: skip
    pointers = dict.fromkeys(("q", "keys", "values"), "*fp16") | {
        "pages": "*i32", "counts": "*i32", "out": "*bf16", "scale": "fp32", "page_stride": "i32*16",
    }  # fmt: skip
    return compile_kernel(
        chunk_kernel.chunk_attention_kernel, pointers, constants, sm=sm, warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip


def unpack_pages(sm: int, kv_format: str, head_dim: str, which: str):
    """The unpacking of listed pages of 256 tokens, of keys or values."""
    fmt, dim = KvFormat(kv_format), int(head_dim)
    constants = {"SIZE": page_layout(fmt, 256, dim).size, "DIM": dim, "PAGE": 256, "PTX": True}
    function = unpack_kernels.unpack_kernel
    if fmt is KvFormat.TQ3_0 and which == "values":
        function = unpack_kernels.unpack_tq3_values_kernel
        constants |= {"TILES": value_tiles(256)}
    elif fmt is KvFormat.TQ3_0:
        function = unpack_kernels.unpack_tq3_keys_kernel
        constants |= {"T": UNPACKED_TOKENS}
    else:
        constants |= {"T": UNPACKED_TOKENS, "FORMAT": list(KvFormat).index(fmt)}
    pointers = {"pages": "*u8", "page_list": "*i32", "out": "*fp16"}
    pointers |= {"page_stride": "i32*16", "head_stride": "i32*16"}
    return compile_kernel(function, pointers, constants, sm=sm, warps=4)


ATTENTION_KERNELS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        attend, attend_tq3, quantize_queries, merge_parts, attention_inputs, attend_many,
        chunk_attention, unpack_pages,
    )
}  # fmt: skip

if __name__ == "__main__":
    KERNELS.update(ATTENTION_KERNELS)
    main()
