"""A device of plain memory whose copies are carried out as late as they may be."""

import threading
from collections import deque

import torch

from ragflash.kvcache.copies import Copies, Wait


class LateCopies(Copies):
    """Carries copies out in order, when somebody waits for one; a source is read only then.

    Attributes:
        most_pending: Copies that waited at once.
        num_done: Copies that were carried out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._num_started = 0
        self.num_done = 0
        self.most_pending = 0

    def pinned(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        with self._lock:
            self._pending.append((source, target))
            self._num_started += 1
            self.most_pending = max(self.most_pending, len(self._pending))
            number = self._num_started
        return lambda: self._carry_out(number)

    def follow(self) -> Wait:
        return self._carry_out_all

    def precede(self) -> None:
        self._carry_out_all()

    def _carry_out_all(self) -> None:
        self._carry_out(self._num_started)

    def _carry_out(self, number: int) -> None:
        with self._lock:
            while self.num_done < number:
                source, target = self._pending.popleft()
                target.copy_(source)
                self.num_done += 1
