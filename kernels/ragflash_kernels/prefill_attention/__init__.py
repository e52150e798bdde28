"""Attention of a chunk of one sequence's rows over packed history, exact history and itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat, page_layout
from ragflash_kernels.prefill_attention.backends import PrefillBackend, pick_prefill_backend
from ragflash_kernels.prefill_attention.reference import prefill_attention_reference
from ragflash_kernels.prefill_attention.workspace import PrefillWorkspace

__all__ = [
    "PackedHistory",
    "PrefillBackend",
    "PrefillWorkspace",
    "decode_pages_into",
    "pick_prefill_backend",
    "prefill_attention",
]


@dataclass(frozen=True, slots=True)
class PackedHistory:
    """Old tokens in whole packed pages, which every row sees.

    Attributes:
        keys: uint8 `[P, Hkv, size]` as `kv_codec.encode_pages` writes it; pages may lie apart.
        values: Likewise.
        pages: int32 `[n]` on the same device: page numbers in order.
        key_format: Of `keys`, not `F16`.
        value_format: Of `values`, not `F16`.
    """

    keys: Tensor
    values: Tensor
    pages: Tensor
    key_format: KvFormat
    value_format: KvFormat


def prefill_attention(
    q: Tensor,
    exact_keys: Tensor,
    exact_values: Tensor,
    exact_pages: Tensor,
    exact_before: int,
    packed: PackedHistory | None = None,
    *,
    scale: float,
    window: int | None = None,
    gate: Columns | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: PrefillWorkspace | None = None,
    backend: PrefillBackend | None = None,
) -> Tensor:
    """Attend, head by head; `Hq / Hkv` consecutive query heads share a key head.

    Row r sees all packed tokens and the first `exact_before + r + 1` exact ones; places that no row
    sees may hold anything. A result depends on the parts' lengths and the backend alone.

    Args:
        q: Floats `[N, Hq, D]`, the last two dimensions contiguous.
        exact_keys: float16 `[P, Hkv, page_tokens, D]`, contiguous but for the pages, the rows' own
            keys included.
        exact_values: Likewise.
        exact_pages: int32 `[n]` on the device: pages of the exact tokens in order.
        exact_before: Exact tokens before the first row.
        packed: Tokens older than the exact ones.
        scale: Of the scores before the softmax, usually `D ** -0.5`.
        window: Newest tokens that a row sees, its own included. It must end within the exact
            tokens after their first page where there is packed history, which it then skips.
        gate: N rows of Hq · D columns, by whose sigmoid results are multiplied.
        out_dtype: Of the result; None for that of `q`.
        workspace: Scratch; the reference needs none.
        backend: None picks the fastest that was found to work on the device.

    Returns:
        `[N, Hq, D]`, contiguous.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(q, exact_keys, exact_values, exact_pages, exact_before, gate)
    if packed is not None:
        _check_packed(packed, exact_keys)
    if window is not None:
        _check_window(window, exact_before, exact_keys.shape[2], packed)
        packed = None
    chosen = backend or pick_prefill_backend(q.device, q.shape[2], windowed=window is not None)
    history = packed if packed is not None and len(packed.pages) else None
    arguments = (q, exact_keys, exact_values, exact_pages, exact_before, history, scale, window)
    ending = (gate, out_dtype or q.dtype)
    if chosen is PrefillBackend.REFERENCE:
        return prefill_attention_reference(*arguments, *ending)
    if workspace is None or (window is not None and chosen is not PrefillBackend.TRITON):
        raise KernelInputError(f"{chosen} needs a workspace, and {window=} the Triton kernel")
    from ragflash_kernels.prefill_attention.launch import attend_in_pieces  # noqa: PLC0415 - lazy

    return attend_in_pieces(*arguments, *ending, workspace, chosen)


def decode_pages_into(
    pages: Tensor,
    page_list: Tensor,
    kv_format: KvFormat,
    *,
    page_tokens: int,
    head_dim: int,
    out: Tensor,
    values: bool = False,
) -> None:
    """Decode listed pages one after the other, values left rotated, on a card.

    Args:
        pages: uint8 `[P, Hkv, size]`, pages may lie apart; float16 `[P, Hkv, page_tokens, D]` for
            `F16`.
        page_list: int32 `[n]` on the same device.
        kv_format: Of `pages`.
        page_tokens: Tokens of a page, a power of two.
        head_dim: D: 64, 128 or 256.
        out: float16 `[Hkv, n · page_tokens, D]`, contiguous.
        values: They are values, not keys.

    Raises:
        KernelInputError: `out` does not fit.
    """
    shape = (pages.shape[1], len(page_list) * page_tokens, head_dim)
    if out.shape != shape or out.dtype != torch.float16 or not out.is_contiguous():
        raise KernelInputError(f"out is {out.dtype} {tuple(out.shape)}, not float16 {shape}")
    from ragflash_kernels.prefill_attention.unpack.launch import unpack_pages  # noqa: PLC0415 - lazy

    unpack_pages(pages, page_list, kv_format, page_tokens, out, values=values)


def _check(
    q: Tensor,
    exact_keys: Tensor,
    exact_values: Tensor,
    exact_pages: Tensor,
    exact_before: int,
    gate: Columns | None,
) -> None:
    if q.dim() != 3 or exact_keys.dim() != 4 or exact_keys.shape != exact_values.shape:
        raise KernelInputError(
            f"q {tuple(q.shape)}, keys {tuple(exact_keys.shape)} and values "
            f"{tuple(exact_values.shape)} are not [N, Hq, D] and twice [P, Hkv, page_tokens, D]"
        )
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_tokens, key_dim = exact_keys.shape
    if head_dim != key_dim or num_heads % num_kv_heads:
        raise KernelInputError(
            f"{num_heads} query heads of {head_dim} do not fit {num_kv_heads} of {key_dim}"
        )
    if gate is not None and (gate.partials.shape[1], gate.width) != (
        num_rows,
        num_heads * head_dim,
    ):
        raise KernelInputError(
            f"a gate of {gate.partials.shape[1]} rows of {gate.width} for {tuple(q.shape)}"
        )
    if exact_before < 0 or exact_before + num_rows > len(exact_pages) * page_tokens:
        raise KernelInputError(
            f"{exact_before} + {num_rows} tokens do not fit {len(exact_pages)} pages"
        )


def _check_window(
    window: int, exact_before: int, page_tokens: int, packed: PackedHistory | None
) -> None:
    if window < 1:
        raise KernelInputError(f"a window of {window} tokens")
    if packed is not None and window > exact_before - page_tokens + 1:
        raise KernelInputError(
            f"a window of {window} tokens reaches beyond {exact_before} exact ones"
        )


def _check_packed(packed: PackedHistory, exact_keys: Tensor) -> None:
    _, num_kv_heads, page_tokens, head_dim = exact_keys.shape
    for pages, kv_format in (
        (packed.keys, packed.key_format),
        (packed.values, packed.value_format),
    ):
        size = page_layout(kv_format, page_tokens, head_dim).size
        if kv_format is KvFormat.F16 or pages.shape[1:] != (num_kv_heads, size):
            raise KernelInputError(
                f"packed pages {tuple(pages.shape)} are not [P, {num_kv_heads}, {size}] of "
                f"{kv_format}"
            )
