"""What a drafter's captured launches read of a sequence."""

import numpy as np
import torch

from ragflash.models.device.staging import StagedTables
from ragflash.models.dflash.config import DFlashConfig
from ragflash.models.dflash.paged_ring import PagedRing, PagedRings
from ragflash_kernels.paged_attention import Visibility

Sight = tuple[int | None, bool]  # a layer's window, and whether its rows see none after them


class PositionTables(StagedTables):
    """Where rows stand, and where their keys and values go; rows of page -1 go nowhere.

    Args:
        sections: Further tables.
        max_rows: Rows at most.
        rings: That they are written to.
        device: Where the tables are read.
    """

    def __init__(
        self,
        sections: dict[str, tuple[int, ...]],
        *,
        max_rows: int,
        rings: PagedRings,
        device: torch.device,
    ) -> None:
        rows = dict.fromkeys(("positions", "row_pages", "row_places"), (max_rows,))
        super().__init__(rows | sections, device)
        self.rings = rings

    def fill(self, slot: int, position: int, num_rows: int) -> None:
        """Describe rows from a position on, and send it."""
        self._place(self.begin(), slot, position, num_rows)
        self.send()

    def _place(self, host: dict[str, np.ndarray], slot: int, position: int, num_rows: int) -> None:
        positions = np.arange(position, position + num_rows)
        page_tokens, slot_pages = self.rings.page_tokens, self.rings.slot_pages
        host["positions"][:num_rows] = positions
        host["row_pages"][:] = -1
        host["row_pages"][:num_rows] = positions // page_tokens % slot_pages + slot * slot_pages
        host["row_places"][:num_rows] = positions % page_tokens


class BlockTables(PositionTables):
    """A block of rows, behind the tokens that a ring holds.

    Args:
        config: Of the drafter; blocks have as many rows as it was trained on.
        rings: Of its sequences.
        device: Where the tables are read.
    """

    def __init__(self, config: DFlashConfig, rings: PagedRings, device: torch.device) -> None:
        layers = range(config.num_layers)
        self._sights = [*dict.fromkeys((config.windows[at], config.is_causal(at)) for at in layers)]
        self._num_rows = num_rows = config.block_size
        self._mask = config.mask_token_id
        self._words = np.stack([_words(num_rows, sight) for sight in self._sights])
        sections: dict[str, tuple[int, ...]] = {
            "token_ids": (num_rows,),
            "words": (len(self._sights), num_rows),
            "starts": (len(self._sights), num_rows),
            "first_rows": (2,),
            "ends": (1,),
            "page_table": (1, rings.slot_pages),
        }
        super().__init__(sections, max_rows=num_rows, rings=rings, device=device)

    def visibility(self, sight: Sight) -> Visibility:
        """Return what rows see in layers of a kind."""
        at = self._sights.index(sight)
        return Visibility(
            page_table=self["page_table"],
            first_rows=self["first_rows"],
            starts=self["starts"][at],
            ends=self["ends"],
            words=self["words"][at],
            max_rows=self._num_rows,
            max_tokens=self.rings.slot_pages * self.rings.page_tokens,
        )

    def describe(self, pending: int, slot: int, ring: PagedRing) -> None:
        """Describe a pending token and masks behind what a ring holds, and send it."""
        host, num_rows, rings = self.begin(), self._num_rows, self.rings
        self._place(host, slot, ring.end, num_rows)
        base = ring.start // rings.page_tokens * rings.page_tokens  # what the page table begins at
        host["token_ids"][:] = [pending, *[self._mask] * (num_rows - 1)]
        host["words"][:] = self._words
        host["first_rows"][:] = 0, num_rows
        host["ends"][0] = ring.end - base
        steps = range(0, rings.slot_pages * rings.page_tokens, rings.page_tokens)
        host["page_table"][0] = [rings.page(slot, base + step) for step in steps]
        positions = np.arange(ring.end, ring.end + num_rows)
        for at, (window, _) in enumerate(self._sights):
            oldest = positions * 0 if window is None else positions - window + 1
            host["starts"][at] = np.maximum(oldest, ring.start) - base
        self.send()


def _words(num_rows: int, sight: Sight) -> np.ndarray:
    """Return for each row a word, int32, whose bit j says that it sees row j of the block."""
    window, is_causal = sight
    words = [
        sum(
            1 << other
            for other in range(row + 1 if is_causal else num_rows)
            if window is None or abs(row - other) < window
        )
        for row in range(num_rows)
    ]
    return np.array(words, dtype=np.uint32).view(np.int32)
