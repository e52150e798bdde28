"""The memory of all pages; one holds the keys and values of 256 tokens in every attention layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Self

import torch

from ragflash.kvcache.allocator import PAGE_TOKENS, PageForm
from ragflash.kvcache.formats import KVFormatName
from ragflash.kvcache.table import PageConversion, PageCopy
from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages, page_layout
from ragflash_kernels.token_moves import move_tokens


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


@dataclass(frozen=True, slots=True)
class _TokenValues:
    """Where a page has the values of a token, int32, one entry a value: K and V of all layers.

    Attributes:
        starts: Of the page's first token.
        strides: From one token to the next.
    """

    starts: torch.Tensor
    strides: torch.Tensor

    @classmethod
    def of(cls, layout: KVLayout, device: torch.device | str) -> Self:
        """Work them out on the host, and keep them where the pages are."""
        starts: list[int] = []
        strides: list[int] = []
        start = 0
        for layer in layout.layers:
            for head in range(2 * layer.num_kv_heads):
                first = start + head * PAGE_TOKENS * layer.head_dim
                starts += range(first, first + layer.head_dim)
            strides += [layer.head_dim] * (2 * layer.num_kv_heads * layer.head_dim)
            start += layer.page_values
        return cls(
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(strides, dtype=torch.int32, device=device),
        )


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
        self._layers = tuple(self._views(self._storage))  # [P, 2, Hkv, 256, D] each
        self._token = _TokenValues.of(layout, device)

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

    def move(self, pages: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """Copy tokens of a sequence, K and V of all layers, to other places of it.

        Args:
            pages: Of the sequence.
            moves: From where to where, in order; no target is the source of a later one.
        """
        if not moves:
            return
        places = torch.tensor(
            [
                [x for at in move for x in (pages[at // PAGE_TOKENS], at % PAGE_TOKENS)]
                for move in moves
            ]
        )
        if self._storage.is_cuda:  # else the host would wait for the card
            places = places.pin_memory()
        places = places.to(self._storage.device, non_blocking=True)
        move_tokens(self._storage, self._token.starts, self._token.strides, places)

    def copy(self, copy: PageCopy) -> None:
        """Copy the first tokens of a page, in all layers, to another page."""
        if copy.num_tokens == PAGE_TOKENS:
            self._storage[copy.dst].copy_(self._storage[copy.src])
            return
        for views in self._layers:
            kept = views[copy.src, :, :, : copy.num_tokens]
            views[copy.dst, :, :, : copy.num_tokens].copy_(kept)

    def clear(self, image: torch.Tensor, num_tokens: int) -> None:
        """Make the places after a page's first tokens 0 in a copy of it, whatever they held."""
        if num_tokens < PAGE_TOKENS:
            for views in self._views(image[None]):
                views[..., num_tokens:, :] = 0

    def _views(self, storage: torch.Tensor) -> Iterator[torch.Tensor]:
        layers = self.layout.layers
        ends = accumulate(layer.page_values for layer in layers)
        for layer, end in zip(layers, ends, strict=True):
            values = storage[:, end - layer.page_values : end]
            yield values.view(-1, 2, layer.num_kv_heads, PAGE_TOKENS, layer.head_dim)


@dataclass(frozen=True, slots=True)
class _LayerRun:
    """Consecutive layers that are packed alike.

    Attributes:
        layer: Shape of each.
        offsets: Taken off their keys, `[Hkv, D]`; layers that have some are alone.
        num_layers: How many.
        first_value: Where the first of them begins in an exact page.
        first_byte: In a packed page.
        head_bytes: Of K, or of V, of a head of a packed page.
    """

    layer: LayerKV
    offsets: torch.Tensor | None
    num_layers: int
    first_value: int
    first_byte: int
    head_bytes: int

    def values_of(self, page: torch.Tensor) -> torch.Tensor:
        """Return a view `[layers, 2, Hkv, 256, D]` of an exact page."""
        heads, end = self.layer.num_kv_heads, self.num_layers * self.layer.page_values
        values = page[self.first_value : self.first_value + end]
        return values.view(-1, 2, heads, PAGE_TOKENS, self.layer.head_dim)

    def bytes_of(self, page: torch.Tensor) -> torch.Tensor:
        """Return a view `[layers, 2, Hkv, size]` of a packed page."""
        heads = self.layer.num_kv_heads
        end = self.num_layers * 2 * heads * self.head_bytes
        return page[self.first_byte : self.first_byte + end].view(-1, 2, heads, self.head_bytes)


class PackedPool:
    """Storage `[P, bytes of a page]`; in a page layer after layer, `[2, Hkv, size]`, K before V.

    Args:
        layout: Of the exact pages that are packed.
        kv_format: Of all layers, K and V alike.
        num_pages: P.
        device: Where the storage is.
        offsets: For each layer float32 `[Hkv, D]`, what is taken off its keys before they are
            packed, a constant of the model, or `None`; `None` takes nothing off any.

    Attributes:
        kv_format: As given.
        offsets: As given, one entry a layer. Who attends to packed keys as they are adds
            `scale · q · offset` to all their scores, which is to the logarithm of their sum of
            exponentials: their mixture alone does not change by it.
    """

    def __init__(
        self,
        layout: KVLayout,
        kv_format: KVFormatName,
        num_pages: int,
        device: torch.device | str = "cpu",
        *,
        offsets: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self.kv_format = KvFormat(kv_format)
        self.num_pages = num_pages
        self.offsets: tuple[torch.Tensor | None, ...] = (
            (None,) * len(layout.layers) if offsets is None else tuple(offsets)
        )
        self._head_dims = [layer.head_dim for layer in layout.layers]
        page_bytes = packed_page_bytes(layout, kv_format)
        self._storage = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device)
        self._layers = tuple(self._views(layout))  # [P, 2, Hkv, size] each
        self._runs = tuple(_runs_of(layout, self.offsets, self.kv_format))

    @property
    def nbytes(self) -> int:
        """Size of the storage in bytes."""
        return self._storage.nbytes

    def page(self, page: int) -> torch.Tensor:
        """Return a view of all bytes of one page, contiguous."""
        return self._storage[page]

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view `[P, Hkv, size]` of one layer's keys, as `kv_codec` lays them out."""
        return self._layers[layer][:, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Return a view `[P, Hkv, size]` of one layer's values."""
        return self._layers[layer][:, 1]

    def encode(self, exact: PagePool, conversions: Sequence[PageConversion]) -> None:
        """Pack whole pages; layers that are alike at once, as launches cost more than packing."""
        for conversion in conversions:
            source, target = exact.page(conversion.exact), self.page(conversion.packed)
            for run in self._runs:
                values, packed = run.values_of(source), run.bytes_of(target)
                keys = encode_pages(values[:, 0], self.kv_format, offsets=run.offsets)
                packed[:, 0] = keys
                packed[:, 1] = encode_pages(values[:, 1], self.kv_format, values=True)

    def decode(self, layer: int, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a layer's pages stand for: K and V, float32 `[n, Hkv, 256, D]`."""
        at, head_dim = list(pages), self._head_dims[layer]
        keys, values = (
            decode_pages(
                packed[at],
                self.kv_format,
                page_tokens=PAGE_TOKENS,
                head_dim=head_dim,
                values=of_values,
            )
            for packed, of_values in ((self.keys(layer), False), (self.values(layer), True))
        )
        offsets = self.offsets[layer]
        return keys if offsets is None else keys + offsets[:, None], values

    def _views(self, layout: KVLayout) -> Iterator[torch.Tensor]:
        start = 0
        for layer in layout.layers:
            size = _head_bytes(layer, self.kv_format)
            end = start + 2 * layer.num_kv_heads * size
            yield self._storage[:, start:end].view(-1, 2, layer.num_kv_heads, size)
            start = end


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of all sequences.

    Attributes:
        exact: Pages as they were computed.
        packed: Older pages in fewer bits; `None` when all are exact.
    """

    exact: PagePool
    packed: PackedPool | None = None

    def page(self, form: PageForm, page: int) -> torch.Tensor:
        """Return a view of all of one page, contiguous."""
        return self._pool(form).page(page)

    def clear(self, form: PageForm, image: torch.Tensor, num_tokens: int) -> None:
        """Make the places after a page's first tokens 0 in a copy of it; packed ones are full."""
        if form is PageForm.EXACT:
            self.exact.clear(image, num_tokens)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Carry out what a fork needs."""
        for copy in copies:
            self.exact.copy(copy)

    def convert(self, conversions: Sequence[PageConversion]) -> None:
        """Carry out what a table that grew needs."""
        if conversions:
            assert self.packed is not None
            self.packed.encode(self.exact, conversions)

    def in_order(
        self, layer: int, pages: Sequence[int], packed_pages: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a sequence's K and V of one layer in order of position, `[n, Hkv, 256, D]` each.

        Args:
            layer: Its number.
            pages: The first page, then those after the packed ones.
            packed_pages: In between.
        """
        at = list(pages)
        exact = self.exact.keys(layer)[at], self.exact.values(layer)[at]
        if self.packed is None or not packed_pages:
            return exact
        packed = self.packed.decode(layer, packed_pages)
        keys, values = (
            torch.cat((own[:1], old.to(own.dtype), own[1:]))
            for own, old in zip(exact, packed, strict=True)
        )
        return keys, values

    def _pool(self, form: PageForm) -> PagePool | PackedPool:
        if form is PageForm.EXACT:
            return self.exact
        assert self.packed is not None
        return self.packed


def packed_page_bytes(layout: KVLayout, kv_format: KVFormatName) -> int:
    """Return the size of a packed page."""
    form = KvFormat(kv_format)
    return sum(2 * layer.num_kv_heads * _head_bytes(layer, form) for layer in layout.layers)


def _head_bytes(layer: LayerKV, form: KvFormat) -> int:
    return page_layout(form, PAGE_TOKENS, layer.head_dim).size


def _runs_of(
    layout: KVLayout, offsets: Sequence[torch.Tensor | None], form: KvFormat
) -> Iterator[_LayerRun]:
    """Cut the layers into runs that are packed alike."""
    numbers = groupby(
        range(len(layout.layers)),
        lambda at: (layout.layers[at], None if offsets[at] is None else at),
    )
    first_value = first_byte = 0
    for (layer, alone), members in numbers:
        num_layers, size = len([*members]), _head_bytes(layer, form)
        own = None if alone is None else offsets[alone]
        yield _LayerRun(layer, own, num_layers, first_value, first_byte, size)
        first_value += num_layers * layer.page_values
        first_byte += num_layers * 2 * layer.num_kv_heads * size
