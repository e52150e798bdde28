"""Copies between a device and the host that go on beside what the device computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Wait = Callable[[], None]
"""Returns when something that was started is done; may be called from any thread."""


class Copies(Protocol):
    """Starts copies, which are carried out one after the other; thread-safe but for two methods.

    The thread that has the device compute calls `follow` and `precede`.
    """

    def pinned(self, *shape: int) -> torch.Tensor:
        """Return bytes of the host that need no staging."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """Copy bytes between pinned memory and the device."""

    def follow(self) -> Wait:
        """Have copies wait for what was given to the device to compute; return how to wait too."""

    def precede(self) -> None:
        """Have what the device is given to compute wait for the copies that were started."""


class StreamCopies(Copies):
    """Copies on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, *shape: int) -> torch.Tensor:
        """See `Copies`."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """See `Copies`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._reached()

    def follow(self) -> Wait:
        """See `Copies`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._reached()

    def precede(self) -> None:
        """See `Copies`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _reached(self) -> Wait:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize


@dataclass(slots=True, eq=False)
class Slot:
    """A piece of pinned memory.

    Attributes:
        tensor: For copies.
        array: The same bytes for everybody else.
        wait: For the copy that was started last.
    """

    tensor: torch.Tensor
    array: NDArray[np.uint8]
    wait: Wait


class Ring:
    """Slots that go round: whoever takes one has it alone until it is given back; thread-safe.

    Args:
        memory: Pinned, `[slots, bytes of a slot]`.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._slots: SimpleQueue[Slot] = SimpleQueue()
        for row in memory:
            self._slots.put(Slot(row, row.numpy(), lambda: None))

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Lend the slot that was given back first, when its copy is done; wait if there is none."""
        slot = self._slots.get()
        try:
            slot.wait()
            yield slot
        finally:
            self._slots.put(slot)
