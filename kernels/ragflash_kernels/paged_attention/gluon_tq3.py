"""Launch of the attention over TQ3_0 pages on NVIDIA cards."""

from dataclasses import dataclass
from math import e, log2, sqrt

import torch
import triton
from torch import Tensor

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat, page_layout
from ragflash_kernels.kv_codec.formats import rotation_group
from ragflash_kernels.kv_codec.reference import sign_vectors
from ragflash_kernels.paged_attention.gluon_kernel import attend_tq3_kernel
from ragflash_kernels.paged_attention.gluon_ptx import KEY_UNIT
from ragflash_kernels.paged_attention.query_kernel import quantize_queries_kernel
from ragflash_kernels.paged_attention.visibility import Visibility

_QUERIES = 8  # of a tile
_TOKENS = 128  # of a step, where heads have most values
_TILE_COUNTS = (1, 2, 3, 4, 6, 8, 12)  # that a program may take; each is compiled
_UNPACKING = 3.5  # what unpacking costs a program, in tiles
_TWO_BUFFERS = 8  # up to so many tiles two buffers of weights fit 48 KB with the rest
_AHEAD_TILES = 3  # up to which registers are left for the next step's keys
_TWO_PROGRAMS = 128, 6  # registers of a thread, up to so many tiles: an SM then has two programs


@dataclass(frozen=True, slots=True)
class Tq3Options:
    """How programs are launched; None is what was found fastest on an H200.

    Attributes:
        tiles: Of eight queries, that a program takes.
        registers: That a thread takes at most.
        ahead: Load the keys of the next step early.
    """

    tiles: int | None = None
    registers: int | None = None
    ahead: bool | None = None


_FASTEST = Tq3Options()


def attend_tq3(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    *,
    page_tokens: int,
    scale: float,
    split_tokens: int,
    out: Tensor,
    lse: Tensor,
    rotate: bool = False,
    options: Tq3Options = _FASTEST,
    eager: bool = False,
) -> None:
    """Attend to each split of packed tokens, in the space that they are stored in.

    The tokens before a sequence's end are shared evenly among the splits, on the device: a graph
    for the longest text serves short ones as well. 64 splits of 4 heads suit an H200.

    Queries are rounded to 1/127 of their largest value and levels of keys to 1/53, weights and
    values to float16. A row's result depends on its sequence's end, on the number of splits and
    their least size, but neither on other rows nor on the options.

    Args:
        q: Floats `[N, Hq, D]`, contiguous, in the space of keys; D is 64, 128 or 256.
        keys: Bytes `[P, Hkv, size]` of `TQ3_0`; a page is contiguous, pages may lie apart.
        values: Likewise, encoded as values.
        visibility: Of the rows, without words.
        page_tokens: A multiple of 128.
        scale: Of scores.
        split_tokens: That a split has at least, a multiple of 128; splits are longer where there
            are too few of them for a sequence.
        out: float32 `[N, Hq, splits, D]`, written: weighted means; undefined where `lse` is -inf.
        lse: float32 `[N, Hq, splits]`, written: base-2 logarithms of sums of weights, -inf where a
            row sees nothing.
        rotate: Queries are in the space of the model; rotate them first.
        options: Of the launch.
        eager: Programmatic dependent launch (sm_90).

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(q, keys, values, visibility, page_tokens, split_tokens)
    if lse.shape[:2] != q.shape[:2] or out.shape != (*lse.shape, q.shape[2]):
        raise KernelInputError(f"out is {tuple(out.shape)}, lse {tuple(lse.shape)}")
    group = q.shape[1] // keys.shape[1]
    needed = triton.cdiv(min(visibility.max_rows, len(q)) * group, _QUERIES)
    tiles = options.tiles or pick_tiles(needed)
    groups = triton.cdiv(needed, tiles)
    queries = _quantize_queries(
        q, visibility, keys.shape[1], tiles * groups, scale, rotate=rotate, eager=eager
    )
    _launch(
        queries, keys, values, visibility, page_tokens, split_tokens, out, lse, tiles, options,
        eager=eager,
    )  # fmt: skip


def _quantize_queries(
    q: Tensor,
    visibility: Visibility,
    kv_heads: int,
    tiles: int,
    scale: float,
    *,
    rotate: bool,
    eager: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `quantize_queries_kernel` writes."""
    head_dim, shape = q.shape[2], (visibility.ends.shape[0], kv_heads, tiles)
    rotated = rotation_group(head_dim)
    q8 = torch.empty((*shape, _QUERIES * head_dim), dtype=torch.int8, device=q.device)
    scales = torch.empty((*shape, _QUERIES), device=q.device)
    bounds = torch.empty((*shape, 2), dtype=torch.int32, device=q.device)
    quantize_queries_kernel[_QUERIES * tiles, kv_heads, shape[0]](
        q, visibility.first_rows, visibility.starts, *sign_vectors(rotated, q.device), q8, scales,
        bounds, scale * log2(e) / KEY_UNIT, 1 / sqrt(rotated), kv_heads, q.shape[1] // kv_heads,
        tiles, DIM=head_dim, ROTATE=rotate, EAGER=eager, num_warps=1, launch_pdl=eager,
    )  # fmt: skip
    return q8, scales, bounds


def _launch(
    queries: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    page_tokens: int,
    split_tokens: int,
    out: Tensor,
    lse: Tensor,
    tiles: int,
    options: Tq3Options,
    *,
    eager: bool,
) -> None:
    sequences, kv_heads, all_tiles = queries[0].shape[:3]
    groups, splits, head_dim = all_tiles // tiles, lse.shape[2], out.shape[3]
    layout = page_layout(KvFormat.TQ3_0, page_tokens, head_dim)
    constants = program_constants(head_dim, tiles)
    if options.ahead is not None:
        constants["AHEAD"] = options.ahead
    attend_tq3_kernel[groups * kv_heads, splits, sequences](
        *queries, keys, values, visibility.page_table, visibility.first_rows, visibility.starts,
        visibility.ends, out, lse, keys.stride(0), values.stride(0), kv_heads,
        out.shape[1] // kv_heads, visibility.page_table.shape[1], splits, split_tokens, all_tiles,
        groups, DIM=head_dim, PAGE=page_tokens, HIGH=layout.high, SCALES=layout.scales,
        SIZE=layout.size, EAGER=eager, num_warps=constants["WARPS"], launch_pdl=eager,
        maxnreg=options.registers or pick_registers(tiles), **constants,
    )  # fmt: skip


def program_constants(head_dim: int, tiles: int) -> dict[str, int]:
    """Return what the kernel is compiled for, apart from the pages."""
    return {
        "TILES": tiles,
        "WARPS": head_dim // 32,
        "BUFFERS": 2 if tiles <= _TWO_BUFFERS else 1,
        "AHEAD": tiles <= _AHEAD_TILES,
    }


def pick_registers(tiles: int) -> int | None:
    """Return how many registers a thread may take; None for no limit."""
    most, up_to = _TWO_PROGRAMS
    return most if tiles <= up_to else None


def pick_tiles(needed: int) -> int:
    """Return how many tiles a program should take of those that are needed."""
    return min(_TILE_COUNTS, key=lambda count: triton.cdiv(needed, count) * (_UNPACKING + count))


def _check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    page_tokens: int,
    split_tokens: int,
) -> None:
    if q.dim() != 3 or q.shape[2] not in {64, 128, 256} or not q.is_contiguous():
        raise KernelInputError(f"q {tuple(q.shape)} is not [N, Hq, 64, 128 or 256], contiguous")
    if page_tokens % _TOKENS or split_tokens % _TOKENS:
        raise KernelInputError(f"pages of {page_tokens} tokens, splits of {split_tokens}")
    if visibility.words is not None:
        raise KernelInputError("rows see packed tokens before the end only: no words")
    num_heads, head_dim = q.shape[1:]
    size = page_layout(KvFormat.TQ3_0, page_tokens, head_dim).size
    for name, pages in (("keys", keys), ("values", values)):
        if pages.dtype != torch.uint8 or pages.dim() != 3 or pages.shape[2] != size:
            raise KernelInputError(f"{name} are {pages.dtype} {tuple(pages.shape)}")
        if not pages[0].is_contiguous() or pages.stride(0) % 16 or pages.data_ptr() % 16:
            raise KernelInputError(f"pages of {name} are not contiguous or not aligned")
    if num_heads % keys.shape[1] or keys.shape[1] != values.shape[1]:
        raise KernelInputError(f"{num_heads} query heads do not fit {keys.shape[1]} key heads")
