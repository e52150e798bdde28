"""Plain torch: all tokens side by side, one softmax in float32."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragflash_kernels.columns import Columns
from ragflash_kernels.kv_codec import decode_pages

if TYPE_CHECKING:
    from ragflash_kernels.prefill_attention import PackedHistory


def prefill_attention_reference(
    q: Tensor,
    exact_keys: Tensor,
    exact_values: Tensor,
    exact_pages: Tensor,
    exact_before: int,
    packed: "PackedHistory | None",
    scale: float,
    window: int | None,
    gate: Columns | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Attend one key head at a time; arguments as in `prefill_attention`."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = exact_keys.shape[1]
    num_exact = exact_before + num_rows
    keys = _tokens(exact_keys[exact_pages.long()])[:, :num_exact]
    values = _tokens(exact_values[exact_pages.long()])[:, :num_exact]
    if packed is not None:
        listed, page_tokens = packed.pages.long(), exact_keys.shape[2]
        old_keys = decode_pages(
            packed.keys[listed], packed.key_format, page_tokens=page_tokens, head_dim=head_dim
        )
        old_values = decode_pages(
            packed.values[listed],
            packed.value_format,
            page_tokens=page_tokens,
            head_dim=head_dim,
            values=True,
        )
        keys = torch.cat((_tokens(old_keys), keys), 1)
        values = torch.cat((_tokens(old_values), values), 1)
    own = torch.arange(keys.shape[1] - num_rows, keys.shape[1], device=q.device)[:, None]
    token = torch.arange(keys.shape[1], device=q.device)
    hidden = token > own
    if window is not None:
        hidden |= token <= own - window
    grouped = q.float().view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    mixed = torch.empty_like(grouped)
    for head in range(num_kv_heads):
        scores = (grouped[head] @ keys[head].T * scale).masked_fill_(hidden, float("-inf"))
        mixed[head] = scores.softmax(-1) @ values[head]
    result = mixed.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
    if gate is not None:
        result = result * gate.sum().view(result.shape).sigmoid()
    return result.to(out_dtype)


def _tokens(pages: Tensor) -> Tensor:
    """Return float32 `[Hkv, tokens, D]` of `[n, Hkv, page_tokens, D]`."""
    return pages.transpose(0, 1).flatten(1, 2).float()
