"""Grids and arguments of the kernels."""

from dataclasses import dataclass, replace
from math import e, log2, sqrt

import torch
import triton
from torch import Tensor

from ragflash_kernels.backend import Backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat, page_layout
from ragflash_kernels.kv_codec.formats import rotation_group
from ragflash_kernels.kv_codec.reference import sign_vectors
from ragflash_kernels.paged_attention.gluon_tq3 import attend_tq3
from ragflash_kernels.paged_attention.kernel import attend_kernel, merge_parts_kernel
from ragflash_kernels.paged_attention.parts import KvPart
from ragflash_kernels.paged_attention.query_kernel import rotate_queries_kernel
from ragflash_kernels.paged_attention.visibility import MAX_ROWS, Visibility
from ragflash_kernels.qmatmul.activations import ActivationBuffers

MIN_TOKENS = 32  # of a page or a split
_CHUNK = 32  # splits that are merged at a time
_LARGE_MEMORY = {(8, 0), (9, 0), (10, 0), (10, 3)}  # compute capabilities
_FORMATS = tuple(KvFormat)  # as `kernel.py` numbers them


@dataclass(frozen=True)
class Tile:
    """What a program works on at a time, and how far ahead it loads."""

    query_rows: int
    tokens: int
    warps: int
    stages: int


def pick_tile(
    kv_format: KvFormat, head_dim: int, tokens: int, query_rows: int, *, large: bool
) -> Tile:
    """Return a tile; a row's sums are the same in every one that rows of a format may meet.

    Scores and mixtures are products that are summed along keys' values and tokens in one order
    whatever the tile's height; sums of weights are such a product too.

    Args:
        kv_format: Of keys; unpacking 64 tokens of a packed one would spill registers.
        head_dim: Values of a head.
        tokens: That a page and a split have at least.
        query_rows: Of a sequence and a key head.
        large: A program may use 160 KB of shared memory.
    """
    if kv_format is not KvFormat.F16:
        return Tile(32, min(tokens, 32), 8 if kv_format is KvFormat.TQ3_0 else 4, 2)
    low = query_rows <= 16 or head_dim == 128  # of 128 values, 32 query rows would spill
    # Two programs an SM hide each other's loads; one that is alone there loads a turn ahead.
    ahead = large and query_rows <= 32 and head_dim == 256
    return Tile(16 if low else 32, min(tokens, 64), 4, 3 if ahead else 2)


def attend_parts_on_card(
    q: Tensor,
    exact: KvPart,
    packed: KvPart | None,
    *,
    scale: float,
    gate: Columns | None,
    out: Tensor | ActivationBuffers,
    backend: Backend,
    eager: bool = False,
) -> None:
    """Attend and write into `out`; the other arguments are those of `attend_parts`."""
    page_tokens = exact.keys.shape[2]
    mixed, lse = attend(q, exact, page_tokens=page_tokens, scale=scale, eager=eager)
    of_packed = None
    if packed is not None:
        of_packed = attend(
            q, replace(packed, visibility=replace(packed.visibility, words=None)),
            page_tokens=page_tokens, scale=scale, backend=backend, eager=eager,
        )  # fmt: skip
    rotated = packed is not None and packed.value_format.rotated
    merge_parts(mixed, lse, of_packed, gate=gate, out=out, rotated=rotated, eager=eager)


def rotate_queries(q: Tensor, *, eager: bool = False) -> Tensor:
    """Rotate as `kv_codec.rotate` does, up to the order of sums: float32 of the shape of `q`."""
    group = rotation_group(q.shape[-1])
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    rotate_queries_kernel[(q.numel() // group,)](
        q, *sign_vectors(group, q.device), out, 1 / sqrt(group), GROUP=group, EAGER=eager,
        num_warps=1, launch_pdl=eager, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def attend(
    q: Tensor,
    part: KvPart,
    *,
    page_tokens: int,
    scale: float,
    backend: Backend = Backend.TRITON,
    eager: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend to each split of a part; means are in the space that its values are stored in.

    Args:
        q: Floats `[N, Hq, D]`, contiguous, not rotated. D is 64, 128 or 256.
        part: Of a cache.
        page_tokens: A power of two, at least 32; at least 128 for the Gluon kernel.
        scale: Of scores.
        backend: `GLUON` has a kernel of its own for TQ3_0 and rows without words.
        eager: Programmatic dependent launch (sm_90).

    Returns:
        Weighted means of values, float32 `[N, Hq, splits, D]`, and base-2 logarithms of the sums of
        weights, `[N, Hq, splits]`, -inf where a row sees nothing; the mean is undefined there.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    fast = backend is Backend.GLUON and part.formats == (KvFormat.TQ3_0, KvFormat.TQ3_0)
    splits, split_tokens = part.pick_shares() if fast else part.pick_splits()
    _check(q, part, page_tokens, split_tokens)
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty((num_rows, num_heads, splits, head_dim), device=q.device)
    lse = torch.empty((num_rows, num_heads, splits), device=q.device)
    if fast:
        attend_tq3(
            q, part.keys, part.values, part.visibility, page_tokens=page_tokens, scale=scale,
            split_tokens=split_tokens, out=out, lse=lse, rotate=True, eager=eager,
        )  # fmt: skip
    else:
        if part.key_format.rotated:
            q = rotate_queries(q, eager=eager)
        _launch_attend(
            q, part, page_tokens=page_tokens, scale=scale, split_tokens=split_tokens, out=out,
            lse=lse, eager=eager,
        )  # fmt: skip
    return out, lse


def _launch_attend(
    q: Tensor,
    part: KvPart,
    *,
    page_tokens: int,
    scale: float,
    split_tokens: int,
    out: Tensor,
    lse: Tensor,
    eager: bool,
) -> None:
    seen: Visibility = part.visibility
    num_heads, head_dim = q.shape[1:]
    kv_heads = part.keys.shape[1]
    group, splits = num_heads // kv_heads, lse.shape[2]
    query_rows = min(seen.max_rows, len(q)) * group
    tile = pick_tile(
        part.key_format, head_dim, min(page_tokens, split_tokens), query_rows,
        large=_has_large_memory(q.device),
    )  # fmt: skip
    tiles = triton.cdiv(query_rows, tile.query_rows)
    keys, values = (pages.view(torch.uint8) for pages in (part.keys, part.values))
    key_bytes, value_bytes = (page_layout(f, page_tokens, head_dim).size for f in part.formats)
    attend_kernel[splits * tiles, kv_heads, seen.ends.shape[0]](
        q, keys, values, seen.page_table, seen.first_rows, seen.starts, seen.ends, seen.words,
        out, lse, scale * log2(e), kv_heads, group, seen.page_table.shape[1], splits, tiles,
        split_tokens, DIM=head_dim, PAGE=page_tokens, KEY_BYTES=key_bytes,
        VALUE_BYTES=value_bytes, KEY_STRIDE=keys.stride(0), VALUE_STRIDE=values.stride(0),
        KEY_FORMAT=_FORMATS.index(part.key_format),
        VALUE_FORMAT=_FORMATS.index(part.value_format), M=tile.query_rows, N=tile.tokens,
        PTX=_has_ptx(q.device), EAGER=eager, num_warps=tile.warps, num_stages=tile.stages,
        launch_pdl=eager,
    )  # fmt: skip


def merge_parts(
    exact: Tensor,
    exact_lse: Tensor,
    packed: tuple[Tensor, Tensor] | None,
    *,
    gate: Columns | None,
    out: Tensor | ActivationBuffers,
    rotated: bool,
    eager: bool = False,
) -> None:
    """Merge what `attend` returned of one part or two, multiply by a gate, and write.

    Args:
        exact: Means of the first part.
        exact_lse: Logarithms of the first part.
        packed: Those of the second.
        gate: Its sigmoid is a factor, `[N, Hq * D]`.
        out: `[N, Hq * D]`, contiguous, or the int8 grid of that.
        rotated: Whether the values of the second part are.
        eager: Programmatic dependent launch (sm_90).
    """
    rows, heads, splits, head_dim = exact.shape
    other, other_lse = (exact, exact_lse) if packed is None else packed
    width = rotation_group(head_dim)
    signs = sign_vectors(width, exact.device)
    if isinstance(out, ActivationBuffers):
        targets = (out.q.view(torch.int8), out.scales, out.sums)
        columns, tiles = out.q.shape[0] * 256, out.q.shape[1]
    else:
        targets, columns, tiles = (out, exact_lse, exact_lse), heads * head_dim, 0
    gated = exact if gate is None else gate.partials[:, :, gate.start :]
    merge_parts_kernel[rows, columns // width](
        exact, exact_lse, other, other_lse, *signs, gated, *targets, gated.stride(0),
        gated.stride(1), heads, splits, other.shape[2], tiles, 1 / sqrt(width), DIM=head_dim,
        WIDTH=width, EXACT_SPLITS=triton.next_power_of_2(splits),
        PACKED_SPLITS=0 if packed is None else triton.next_power_of_2(other.shape[2]),
        CHUNK=_CHUNK, ROTATED=rotated, GATE_PARTS=0 if gate is None else len(gated),
        QUANTIZED=isinstance(out, ActivationBuffers), EAGER=eager, num_warps=4, launch_pdl=eager,
        enable_fp_fusion=False,  # the grid is that of the mixtures as float32
    )  # fmt: skip


def _has_ptx(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _has_large_memory(device: torch.device) -> bool:
    return _has_ptx(device) and torch.cuda.get_device_capability(device) in _LARGE_MEMORY


def _is_tokens(count: int) -> bool:
    return count >= MIN_TOKENS and not count & (count - 1)


def _check(q: Tensor, part: KvPart, page_tokens: int, split_tokens: int) -> None:
    head_dim = q.shape[-1]
    if q.dim() != 3 or head_dim not in (64, 128, 256) or not q.is_contiguous():
        raise KernelInputError(f"q {tuple(q.shape)} is not [rows, Hq, 64, 128 or 256], contiguous")
    if not _is_tokens(page_tokens) or not _is_tokens(split_tokens):
        raise KernelInputError(f"pages of {page_tokens} tokens, splits of {split_tokens}")
    if part.visibility.max_rows > MAX_ROWS:
        raise KernelInputError(f"{part.visibility.max_rows} rows of a sequence; at most {MAX_ROWS}")
    pairs = zip(("keys", "values"), (part.keys, part.values), part.formats, strict=True)
    for name, pages, kv_format in pairs:
        size = page_layout(kv_format, page_tokens, head_dim).size
        bytes_a_head = pages[0, 0].numel() * pages.element_size()
        if bytes_a_head != size or not pages[0].is_contiguous() or pages.device != q.device:
            raise KernelInputError(
                f"{name} {tuple(pages.shape)} on {pages.device} are not pages of {page_tokens} "
                f"tokens of {head_dim} values in {kv_format}"
            )
    kv_heads = part.keys.shape[1]
    if q.shape[1] % kv_heads or kv_heads != part.values.shape[1]:
        raise KernelInputError(
            f"{q.shape[1]} query heads do not fit {kv_heads} key and {part.values.shape[1]} "
            "value heads"
        )
