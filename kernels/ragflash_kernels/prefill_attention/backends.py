"""Who multiplies: attention of rows over tokens side by side, with the sums of weights.

Torch's operators are called directly, since `scaled_dot_product_attention` gives no sums and
chooses by itself. They return natural logarithms of the sums; fewer key heads than query heads are
native to both. cuDNN aligns a causal mask at the first row and first key; the caller's squares do
not ask how. Its plans are kept for each shape and each thread.
"""

from enum import StrEnum
from functools import cache

import torch
from torch import Tensor


class PrefillBackend(StrEnum):
    """The implementations of `prefill_attention`."""

    REFERENCE = "reference"  # plain torch, any device
    TRITON = "triton"  # any card that Triton knows, and its interpreter
    FLASH = "flash"  # torch's flash attention
    CUDNN = "cudnn"  # torch's binding of cuDNN


@cache
def pick_prefill_backend(
    device: torch.device, head_dim: int, *, windowed: bool = False
) -> PrefillBackend:
    """Return the fastest implementation that gives right results on a device; tried once.

    On an H200 with heads of 256, cuDNN is twice as fast as flash.
    """
    if device.type != "cuda":
        return PrefillBackend.REFERENCE
    if not windowed and torch.version.hip is None:
        newest = torch.cuda.get_device_capability(device)[0] >= 9
        for backend in (PrefillBackend.CUDNN, PrefillBackend.FLASH) if newest else (
            PrefillBackend.FLASH,
        ):  # fmt: skip
            if works(backend, device, head_dim):
                return backend
    return PrefillBackend.TRITON


def works(backend: PrefillBackend, device: torch.device, head_dim: int) -> bool:
    """Try one of torch's operators with two query heads on a key head, causal and not."""
    generator = torch.Generator(device).manual_seed(0)
    q, keys, values = (
        torch.randn(256, heads, head_dim, generator=generator, device=device).half()
        for heads in (2, 1, 1)
    )
    for causal in (False, True):
        scores = torch.einsum("nhd,md->hnm", q.float(), keys[:, 0].float()) * head_dim**-0.5
        if causal:
            scores += torch.full_like(scores[0], float("-inf")).triu(1)
        expected = torch.einsum("hnm,md->nhd", scores.softmax(-1), values[:, 0].float())
        try:
            found, lse = attend_torch(
                backend, q, keys.transpose(0, 1), values.transpose(0, 1), head_dim**-0.5,
                causal=causal,
            )  # fmt: skip
        except RuntimeError:
            return False
        close = torch.allclose(found[0].float(), expected, atol=1e-2)
        if not close or not torch.allclose(lse[0], scores.logsumexp(-1), atol=1e-2):
            return False
    return True


def attend_torch(
    backend: PrefillBackend,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool = False,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attend with one of torch's operators, to equal splits of the tokens apart.

    Args:
        backend: `FLASH` or `CUDNN`.
        q: float16 `[R, Hq, D]`.
        keys: float16 `[Hkv, T, D]`.
        values: Likewise.
        scale: Of the scores.
        causal: Row r sees key r and those before; T is R then, and `splits` 1.
        splits: How many, S; they fill a card that few rows leave idle.

    Returns:
        Weighted means `[S, R, Hq, D]`, float16, and natural logarithms of the sums of weights,
        `[S, Hq, R]`, float32.
    """
    queries = q.expand(splits, *q.shape).contiguous().transpose(1, 2)
    k, v = (
        x.reshape(len(x), splits, -1, x.shape[2]).transpose(0, 1) for x in (keys, values)
    )  # [S, Hkv, T / S, D]
    if backend is PrefillBackend.CUDNN:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, k, v, None, True, 0.0, causal, False, scale=scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, k, v, 0.0, causal, False, scale=scale
        )
    return out.transpose(1, 2).contiguous(), lse.view(queries.shape[:3])
