"""A model where it runs."""

from collections.abc import Callable
from dataclasses import dataclass

from ragflash.kvcache.grid import PageAllocators
from ragflash.kvcache.pages import KVPages
from ragflash.models.contract import Model
from ragflash.models.dflash.device import DeviceDFlash


@dataclass(frozen=True, slots=True)
class Placed:
    """A model with the memory of its keys and values.

    Attributes:
        model: Loaded.
        pages: Its keys and values.
        allocators: Of the pages.
        device: For users: the name of a card, or `cpu`.
        arithmetic: For users: what matrices are multiplied in.
        warm_up: To be called first by the thread that will run the model.
        drafter: That was placed with it, on a card.
    """

    model: Model
    pages: KVPages
    allocators: PageAllocators
    device: str
    arithmetic: str
    warm_up: Callable[[], None] = lambda: None
    drafter: DeviceDFlash | None = None
