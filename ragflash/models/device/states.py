"""Recurrent states of a card's slots, and the tapes that rows leave before they are committed."""

from collections.abc import Collection, Sequence

import torch

from ragflash_kernels.gated_delta import DeltaStates, delta_commit


class SlotTapes:
    """Keeps count of which slots have a tape, and applies it.

    Args:
        deltas: States of all recurrent layers; `None` when there are none, and nothing is done.
        max_rows: Most rows that are committed at once.
        max_slots: Sequences.
        device: Where the states are.

    Attributes:
        deltas: As given.
    """

    def __init__(
        self, deltas: DeltaStates | None, *, max_rows: int, max_slots: int, device: torch.device
    ) -> None:
        self.deltas = deltas
        self._device = device
        # Numbers that are there already need no copy.
        self._numbers = torch.arange(max(max_rows, max_slots) + 1, dtype=torch.int32, device=device)
        self._taped: set[int] = set()
        self._early: set[int] = set()  # slots whose last rows are part of their state already

    def note(self, slots: Collection[int]) -> None:
        """Remember that rows of slots left a tape."""
        if self.deltas is not None:
            self._taped.update(slots)

    def drop(self, slot: int) -> None:
        """Remember that rows of a slot left none."""
        self._taped.discard(slot)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """See `Model.commit`."""
        if slot in self._early:
            self._early.remove(slot)
        else:
            self._apply(slot, path)

    def commit_early(self, slot: int, num_rows: int) -> None:
        """Make rows part of a state before they are committed, as is certain that they will be."""
        self._apply(slot, range(num_rows))
        self._early.add(slot)

    def reset(self, slot: int) -> None:
        """See `Model.reset`."""
        self._forget(slot)
        if self.deltas is not None:
            self.deltas.memories[:, slot].zero_()
            self.deltas.tails[:, slot].zero_()

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """Copy a slot's tails `[L, K - 1, C]` and memories `[L, Hv, D, Dv]` to the host.

        The copy is done when all that was launched before it is; only `restore` may read it before.
        """
        if self.deltas is None:
            return ()
        return _to_host(self.deltas.tails[:, slot]), _to_host(self.deltas.memories[:, slot])

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        """See `Model.restore`."""
        self._forget(slot)
        if self.deltas is not None:
            tails, memories = state
            self.deltas.tails[:, slot].copy_(tails, non_blocking=True)
            self.deltas.memories[:, slot].copy_(memories, non_blocking=True)

    def warm_up(self) -> None:
        """Commit a chain and a tree to slot 0, whatever they hold."""
        for path in ((0,), (1,)):
            self.note((0,))
            self._apply(0, path)

    def _forget(self, slot: int) -> None:
        self._taped.discard(slot)
        self._early.discard(slot)

    def _apply(self, slot: int, path: Sequence[int]) -> None:
        if self.deltas is None or slot not in self._taped:
            return
        self._taped.remove(slot)
        if path:
            slots, counts = self._numbers[slot : slot + 1], self._numbers[len(path) : len(path) + 1]
            delta_commit(self.deltas, slots, counts, paths=_paths(path, self._device))


def _to_host(state: torch.Tensor) -> torch.Tensor:
    on_card = state.device.type == "cuda"
    host = torch.empty(state.shape, dtype=state.dtype, pin_memory=on_card)
    return host.copy_(state, non_blocking=on_card)


def _paths(path: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Return rows as the one path of `delta_commit`; `None` where they are the first ones."""
    if path[-1] == len(path) - 1:
        return None
    rows = torch.tensor([path], dtype=torch.int32)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
