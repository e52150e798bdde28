"""The memory of all pages; one holds the keys and values of 256 tokens in every attention layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.kvcache.table import PageCopy


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a page holds.

    Attributes:
        num_layers: Layers with attention; 0 for a model without any.
        num_kv_heads: Heads of K, and of V.
        head_dim: Values a head.
        dtype: Of the stored values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        values = 2 * self.num_layers * self.num_kv_heads * PAGE_TOKENS * self.head_dim
        return values * self.dtype.itemsize


class PagePool:
    """Storage `[P, L, 2, Hkv, 256, D]`, K before V.

    Tokens of one head are contiguous, so that a head's keys in consecutive pages are one strided
    batch of matrices.
    Places that were not written hold anything, NaN included, and must not be read.
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self._storage = torch.empty(
            (num_pages, layout.num_layers, 2, layout.num_kv_heads, PAGE_TOKENS, layout.head_dim),
            dtype=layout.dtype,
            device=device,
        )

    @property
    def nbytes(self) -> int:
        """Size of the storage in bytes."""
        return self._storage.nbytes

    def page(self, page: int) -> torch.Tensor:
        """Return a view `[L, 2, Hkv, 256, D]` of one page, contiguous."""
        return self._storage[page]

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view `[P, Hkv, 256, D]` of one layer's keys."""
        return self._storage[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Return a view `[P, Hkv, 256, D]` of one layer's values."""
        return self._storage[:, layer, 1]

    def write(
        self,
        layer: int,
        pages: Sequence[int],
        first_position: int,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Store K and V `[T, Hkv, D]` of a sequence's positions from `first_position` on."""
        num_rows = k.shape[0]
        row = 0
        while row < num_rows:
            index, place = divmod(first_position + row, PAGE_TOKENS)
            count = min(PAGE_TOKENS - place, num_rows - row)
            target = self._storage[pages[index], layer, :, :, place : place + count]
            target[0].copy_(k[row : row + count].transpose(0, 1))
            target[1].copy_(v[row : row + count].transpose(0, 1))
            row += count

    def copy(self, copy: PageCopy) -> None:
        """Copy the first tokens of a page, in all layers, to another page."""
        source = self._storage[copy.src, ..., : copy.num_tokens, :]
        self._storage[copy.dst, ..., : copy.num_tokens, :].copy_(source)
