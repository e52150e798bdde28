"""Plain torch."""

import torch
from torch import Tensor

from ragflash_kernels.columns import Columns
from ragflash_kernels.rms_norm import rms_norm
from ragflash_kernels.rope import rope

_LARGEST = torch.finfo(torch.float16).max


def attention_inputs_reference(
    products: tuple[Columns, Columns, Columns],
    head_dim: int,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    angles: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
) -> Tensor:
    """Normalise, rotate and write; arguments as in `attention_inputs`, in pairs and threes."""
    q, k, v = (_heads(columns, head_dim) for columns in products)
    q, k = (
        rope(heads if norm is None else rms_norm(heads, norm, eps=eps), *angles)
        for heads, norm in zip((q, k), norms, strict=True)
    )
    row_pages, row_places = places
    written = row_pages >= 0
    at = (row_pages[written].long(), slice(None), row_places[written].long())
    for cached, heads in zip(pages, (k, v), strict=True):
        cached[at] = _saturated(heads[written])
    return _saturated(q)


def _heads(columns: Columns, head_dim: int) -> Tensor:
    rows = columns.partials.shape[1]  # there may be no heads
    return columns.sum().view(rows, columns.width // head_dim, head_dim)


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(-_LARGEST, _LARGEST).half()
