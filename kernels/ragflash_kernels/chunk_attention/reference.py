"""Plain torch: all tokens side by side, one softmax in float32."""

import torch
from torch import Tensor


def chunk_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    counts: Tensor,
    scale: float,
    window: int | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Attend one key head at a time; arguments as in `chunk_attention`."""
    before, num_rows = counts.tolist()
    num_tokens = before + num_rows
    num_pages = -(-num_tokens // keys.shape[2])
    listed = pages[:num_pages].long()
    k, v = (x[listed].transpose(0, 1).flatten(1, 2)[:, :num_tokens].float() for x in (keys, values))
    own = torch.arange(before, num_tokens, device=q.device)[:, None]
    token = torch.arange(num_tokens, device=q.device)
    hidden = token > own
    if window is not None:
        hidden |= token <= own - window
    num_kv_heads = keys.shape[1]
    shape = (num_rows, num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2])
    grouped = q[:num_rows].float().view(shape).permute(1, 2, 0, 3)
    out = torch.zeros(q.shape, dtype=out_dtype, device=q.device)
    mixed = torch.empty_like(grouped)
    for head in range(num_kv_heads):
        scores = (grouped[head] @ k[head].T * scale).masked_fill_(hidden, float("-inf"))
        mixed[head] = scores.softmax(-1) @ v[head]
    out[:num_rows] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(out_dtype)
    return out
