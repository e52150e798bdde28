"""The memory of all pages; one holds the keys and values of 256 tokens in every attention layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch

from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.kvcache.table import PageCopy


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer keeps of a token: `num_kv_heads` keys of `head_dim`, and values."""

    num_kv_heads: int
    head_dim: int

    @property
    def page_values(self) -> int:
        """Numbers in a page, K and V together."""
        return 2 * self.num_kv_heads * PAGE_TOKENS * self.head_dim


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a page holds: one entry an attention layer; none when the model has no attention."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Self:
        """All layers alike."""
        return cls((LayerKV(num_kv_heads, head_dim),) * num_layers, dtype)

    @property
    def page_values(self) -> int:
        """Numbers in a page."""
        return sum(layer.page_values for layer in self.layers)

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        return self.page_values * self.dtype.itemsize


class PagePool:
    """Storage `[P, values of a page]`; in a page layer after layer, `[2, Hkv, 256, D]`, K before V.

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
            (num_pages, layout.page_values), dtype=layout.dtype, device=device
        )
        self._layers = tuple(self._views())  # [P, 2, Hkv, 256, D] each

    @property
    def nbytes(self) -> int:
        """Size of the storage in bytes."""
        return self._storage.nbytes

    def page(self, page: int) -> torch.Tensor:
        """Return a view of all values of one page, contiguous."""
        return self._storage[page]

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view `[P, Hkv, 256, D]` of one layer's keys."""
        return self._layers[layer][:, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Return a view `[P, Hkv, 256, D]` of one layer's values."""
        return self._layers[layer][:, 1]

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
            keys, values = self._layers[layer][pages[index]].narrow(2, place, count).unbind()
            keys.copy_(k[row : row + count].transpose(0, 1))
            values.copy_(v[row : row + count].transpose(0, 1))
            row += count

    def copy(self, copy: PageCopy) -> None:
        """Copy the first tokens of a page, in all layers, to another page."""
        for views in self._layers:
            kept = views[copy.src, :, :, : copy.num_tokens]
            views[copy.dst, :, :, : copy.num_tokens].copy_(kept)

    def _views(self) -> Iterator[torch.Tensor]:
        layers = self.layout.layers
        ends = accumulate(layer.page_values for layer in layers)
        for layer, end in zip(layers, ends, strict=True):
            values = self._storage[:, end - layer.page_values : end]
            yield values.view(-1, 2, layer.num_kv_heads, PAGE_TOKENS, layer.head_dim)
