"""Rings of a card's sequences, in pages that its kernels of attention read."""

from collections.abc import Callable
from itertools import count

import torch

from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.models.dflash.config import DFlashConfig
from ragflash.models.dflash.ring import RING_TOKENS, Ring, pack_state, unpack_state

_SPARE_PAGES = 2  # the oldest token stands somewhere in a page, and a block behind the newest


class PagedRings:
    """Keys and values of every slot's newest tokens.

    A position's page is its number of pages modulo those of a slot, so that nothing is ever moved.

    Args:
        config: Of the drafter.
        max_slots: Sequences.
        device: Where.
        num_tokens: Newest tokens of a sequence that are kept.
        page_tokens: Of a page, a power of two, at least 32.
    """

    def __init__(
        self,
        config: DFlashConfig,
        *,
        max_slots: int,
        device: torch.device,
        num_tokens: int = RING_TOKENS,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.num_tokens = num_tokens
        self.page_tokens = page_tokens
        self.slot_pages = ring_pages(num_tokens, page_tokens)
        self._sizes = config.num_layers, config.num_kv_heads, config.head_dim
        heads = config.num_kv_heads, page_tokens, config.head_dim
        shape = (max_slots * self.slot_pages, config.num_layers, 2, *heads)
        self._values = torch.zeros(shape, dtype=torch.float16, device=device)
        self._owners = [0] * max_slots
        self._numbers = count(1)

    def keys(self, layer: int) -> torch.Tensor:
        """Return a layer's keys, `[P, Hkv, T, D]`; a page is contiguous, pages lie apart."""
        return self._values[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Return a layer's values, as `keys`."""
        return self._values[:, layer, 1]

    def page(self, slot: int, position: int) -> int:
        """Return the number of the page that a position stands in."""
        return slot * self.slot_pages + position // self.page_tokens % self.slot_pages

    def new_owner(self) -> int:
        """Return a number that no ring has."""
        return next(self._numbers)

    def claim(self, slot: int, owner: int) -> bool:
        """Make a slot an owner's; tell whether it was already."""
        is_held, self._owners[slot] = self._owners[slot] == owner, owner
        return is_held

    def read(self, slot: int, start: int, end: int) -> bytes:
        """Return what positions of a slot hold; see `pack_state`."""
        pages, places = self._places(slot, start, end)
        held = self._values[pages, :, :, :, places]  # [N, L, 2, H, D]
        return pack_state(held.permute(1, 2, 0, 3, 4), start)

    def write(self, slot: int, state: bytes) -> tuple[int, int]:
        """Take what `read` returned; return its positions.

        Raises:
            ValueError: See `unpack_state`.
        """
        start, held = unpack_state(state, self._sizes, self._values.dtype)
        end = start + held.shape[2]
        kept = held[:, :, -self.num_tokens :].to(self._values.device)
        pages, places = self._places(slot, end - kept.shape[2], end)
        self._values[pages, :, :, :, places] = kept.permute(2, 0, 1, 3, 4)
        return start, end

    def _places(self, slot: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, end, device=self._values.device)
        pages = positions // self.page_tokens % self.slot_pages + slot * self.slot_pages
        return pages, positions % self.page_tokens


class PagedRing(Ring):
    """The ring of one sequence; it is empty again when another sequence had its slot.

    Args:
        rings: Where it is.
        slot: Returns the sequence's slot, which it has while it runs.
    """

    def __init__(self, rings: PagedRings, slot: Callable[[], int]) -> None:
        super().__init__(rings.num_tokens)
        self._rings = rings
        self._slot = slot
        self._owner = rings.new_owner()

    def claim(self) -> int:
        """Return the slot, which is this ring's from now on."""
        slot = self._slot()
        if not self._rings.claim(slot, self._owner):
            self.restart(self.end)
        return slot

    def export(self) -> bytes:
        """See `Ring`."""
        return self._rings.read(self.claim(), self.start, self.end)

    def load(self, state: bytes) -> None:
        """See `Ring`."""
        start, end = self._rings.write(self.claim(), state)
        self.restart(start)
        self.advance(end - start)


def ring_pages(num_tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Return the pages of a slot, whose ring has so many tokens, with a block behind them."""
    return -(-num_tokens // page_tokens) + _SPARE_PAGES


def ring_bytes(config: DFlashConfig, num_tokens: int = RING_TOKENS) -> int:
    """Return what a slot's ring takes on a card."""
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return ring_pages(num_tokens) * PAGE_TOKENS * values * torch.float16.itemsize
