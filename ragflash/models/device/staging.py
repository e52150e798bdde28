"""Integers at fixed places of a card's memory, where captured kernels read them."""

from collections.abc import Mapping
from itertools import accumulate
from math import prod

import numpy as np
import torch

_STAGES = 2


class StagedTables:
    """Tables that are filled on the host and sent in one copy.

    There are two of them on the host, so that the next can be filled while one is on its way.

    Args:
        sections: Names and shapes of the tables.
        device: Where they are read.
    """

    def __init__(self, sections: Mapping[str, tuple[int, ...]], device: torch.device | str) -> None:
        lengths = [prod(shape) for shape in sections.values()]
        ends = [*accumulate(lengths)]
        on_card = torch.device(device).type == "cuda"
        self._stages = [
            torch.zeros(ends[-1], dtype=torch.int32, pin_memory=on_card) for _ in range(_STAGES)
        ]
        self._sent = [_event() for _ in self._stages] if on_card else []
        self._device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._turn = 0

        def cut(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            spans = zip(sections.items(), ends, lengths, strict=True)
            return {
                name: flat[end - length : end].view(shape) for (name, shape), end, length in spans
            }

        self._views = cut(self._device)
        self._hosts = [
            {name: view.numpy() for name, view in cut(stage).items()} for stage in self._stages
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a table on the card."""
        return self._views[name]

    def begin(self) -> dict[str, np.ndarray]:
        """Return tables to fill; they hold what they held two fillings ago."""
        self._turn = (self._turn + 1) % _STAGES
        if self._sent:
            self._sent[self._turn].synchronize()
        return self._hosts[self._turn]

    def send(self) -> None:
        """Launch the copy of what was filled."""
        self._device.copy_(self._stages[self._turn], non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
