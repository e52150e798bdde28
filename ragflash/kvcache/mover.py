"""Pages and states on their way between a model and bytes: nothing else touches tensors and bytes.

Pages on the host are read in place and copied at once. Those on a device go through a ring of
pinned memory that is allocated once, since pinning is slow: in both directions a slot holds bytes
for as long as one copy takes, and the device goes on computing meanwhile.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ragflash.kvcache.allocator import PageForm
from ragflash.kvcache.archive import PIECE_BYTES, Landing, MemoryLanding
from ragflash.kvcache.copies import Copies, Ring, StreamCopies, Wait
from ragflash.kvcache.pages import KVPages
from ragflash.kvcache.planner import RING_BYTES, SPARE_STATES

_RING_SLOTS = RING_BYTES // PIECE_BYTES


@dataclass(frozen=True, slots=True)
class PageImage:
    """A page that is to be copied; what is behind its first tokens is 0 in the copy."""

    form: PageForm
    page: int
    num_tokens: int


class PageMover(Protocol):
    """Moves pages of one model; for the worker thread."""

    def page_bytes(self, form: PageForm) -> int:
        """Return the size of a page; 0 when the model has no attention."""

    def new_state(self) -> tuple[torch.Tensor, ...]:
        """Return memory of the host for a recurrent state, which `Model.restore` reads fast."""

    def filling(self) -> AbstractContextManager[None]:
        """Let landings of pages be filled: after all that was computed before this context.

        What is computed after it finds the pages filled.
        """

    def landing(self, form: PageForm, page: int) -> Landing:
        """Return where the bytes of a page go to, within `filling`."""

    def fetch(
        self, images: Sequence[PageImage], state: Sequence[torch.Tensor]
    ) -> "Future[tuple[memoryview, ...]]":
        """Copy pages to the host as they are after what was computed until now.

        Nobody may write to them until it is done.

        Args:
            images: What is copied.
            state: A snapshot, whose bytes are added; it is on the host and never written again.
        """

    def close(self) -> None:
        """Wait for what is fetched; nothing may be moved afterwards."""


class HostMover(PageMover):
    """Of pages on the host.

    Args:
        pages: On the host.
        state_shapes: Tensors like those of a snapshot.
    """

    def __init__(self, pages: KVPages, state_shapes: Sequence[torch.Tensor]) -> None:
        self._pages = pages
        self._state_shapes = state_shapes

    def page_bytes(self, form: PageForm) -> int:
        """See `PageMover`."""
        return self._pages.page(form, 0).nbytes

    def new_state(self) -> tuple[torch.Tensor, ...]:
        """See `PageMover`."""
        return tuple(torch.empty_like(shape, device="cpu") for shape in self._state_shapes)

    def filling(self) -> AbstractContextManager[None]:
        """See `PageMover`: whoever computes is the one that waits for the landings."""
        return nullcontext()

    def landing(self, form: PageForm, page: int) -> Landing:
        """See `PageMover`: in the page itself."""
        return landing_in(self._pages.page(form, page))

    def fetch(
        self, images: Sequence[PageImage], state: Sequence[torch.Tensor]
    ) -> Future[tuple[memoryview, ...]]:
        """See `PageMover`; it is done when this returns."""
        copies = []
        for image in images:
            copy = self._pages.page(image.form, image.page).clone()
            self._pages.clear(image.form, copy, image.num_tokens)
            copies.append(copy)
        fetched: Future[tuple[memoryview, ...]] = Future()
        fetched.set_result(_all_bytes(copies, state))
        return fetched

    def close(self) -> None:
        """See `PageMover`."""


class DeviceMover(PageMover):
    """Of pages on a device.

    Args:
        pages: On the device.
        state_shapes: Tensors like those of a snapshot.
        copies: Between it and the host.
        num_slots: Of the ring. A reading thread fills one while others that it filled are copied.
        slot_bytes: What is copied at once.
    """

    def __init__(
        self,
        pages: KVPages,
        state_shapes: Sequence[torch.Tensor],
        copies: Copies,
        *,
        num_slots: int = _RING_SLOTS,
        slot_bytes: int = PIECE_BYTES,
    ) -> None:
        self._pages = pages
        self._copies = copies
        self._slot_bytes = slot_bytes
        self._ring = Ring(copies.pinned(num_slots, slot_bytes))
        self._state_shapes = state_shapes
        self._spare = [self._pin_state() for _ in range(SPARE_STATES)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragflash-fetches")

    def page_bytes(self, form: PageForm) -> int:
        """See `PageMover`."""
        return self._pages.page(form, 0).nbytes

    def new_state(self) -> tuple[torch.Tensor, ...]:
        """See `PageMover`; the first ones were pinned at the start."""
        return self._spare.pop() if self._spare else self._pin_state()

    @contextmanager
    def filling(self) -> Iterator[None]:
        """See `PageMover`; nobody waits for the last copies but the device."""
        self._copies.follow()
        try:
            yield
        finally:
            self._copies.precede()

    def landing(self, form: PageForm, page: int) -> Landing:
        """See `PageMover`."""
        return _DeviceLanding(self._ring, self._copies, _flat(self._pages.page(form, page)))

    def fetch(
        self, images: Sequence[PageImage], state: Sequence[torch.Tensor]
    ) -> Future[tuple[memoryview, ...]]:
        """See `PageMover`; a thread does it."""
        return self._thread.submit(self._fetch, self._copies.follow(), images, state)

    def close(self) -> None:
        """See `PageMover`."""
        self._thread.shutdown()

    def _pin_state(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            self._copies.pinned(shape.nbytes).view(shape.dtype).view(shape.shape)
            for shape in self._state_shapes
        )

    def _fetch(
        self, computed: Wait, images: Sequence[PageImage], state: Sequence[torch.Tensor]
    ) -> tuple[memoryview, ...]:
        computed()
        copies = []
        for image in images:
            page = self._pages.page(image.form, image.page)
            copy = torch.empty_like(page, device="cpu")
            self._copy_out(_flat(page), _flat(copy).numpy())
            self._pages.clear(image.form, copy, image.num_tokens)
            copies.append(copy)
        return _all_bytes(copies, state)

    def _copy_out(self, source: torch.Tensor, target: NDArray[np.uint8]) -> None:
        """Copy bytes from the device, a slot at a time: writing fresh memory takes most of it."""
        for start in range(0, target.size, self._slot_bytes):
            piece = target[start : start + self._slot_bytes]
            with self._ring.slot() as slot:
                part = source[start : start + piece.size]
                self._copies.start(part, slot.tensor[: piece.size])()
                np.copyto(piece, slot.array[: piece.size])


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceLanding(Landing):
    ring: Ring
    copies: Copies
    target: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.target.nbytes

    @contextmanager
    def piece(self, at: slice) -> Iterator[memoryview]:
        num_bytes = at.stop - at.start
        with self.ring.slot() as slot:
            yield slot.array[:num_bytes].data
            slot.wait = self.copies.start(slot.tensor[:num_bytes], self.target[at])


def mover_of(pages: KVPages, state_shapes: Sequence[torch.Tensor]) -> PageMover:
    """Return a mover of pages, wherever they are, and of states like those of a snapshot."""
    device = pages.page(PageForm.EXACT, 0).device
    if device.type == "cpu":
        return HostMover(pages, state_shapes)
    return DeviceMover(pages, state_shapes, StreamCopies(device))


def landing_in(tensor: torch.Tensor) -> Landing:
    """Return a landing whose bytes become those of a tensor of the host."""
    return MemoryLanding(_bytes_of(tensor))


def _all_bytes(*groups: Sequence[torch.Tensor]) -> tuple[memoryview, ...]:
    return tuple(_bytes_of(tensor) for group in groups for tensor in group)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return _flat(tensor).numpy().data


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
