"""State that layers of linear attention keep of a sequence, whatever its length."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from ragflash_kernels.conv1d import tail_after
from ragflash_kernels.gated_delta import Tape, gated_delta_advance


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of one layer's state.

    Attributes:
        tail: Rows and channels that the convolution looks back on, `[K - 1, C]`.
        memory: Of the delta rule, `[Hv, D, Dv]`.
    """

    tail: tuple[int, int]
    memory: tuple[int, int, int]

    @property
    def num_values(self) -> int:
        """Numbers of both."""
        return prod(self.tail) + prod(self.memory)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """What one layer has computed of a forward's rows, and not made part of its state.

    Attributes:
        inputs: Of the convolution, `[T, C]`, drafts included.
        memory: After the rows that are no draft.
        tape: What the drafts would do to it; `None` without drafts.
    """

    inputs: torch.Tensor
    memory: torch.Tensor
    tape: Tape | None


@dataclass(slots=True)
class _Slot:
    tails: list[torch.Tensor]
    memories: list[torch.Tensor]
    pending: dict[int, LayerRows] = field(default_factory=dict)


class SlotStates:
    """The state of every slot, float32; a forward reads it, only `commit` changes it."""

    def __init__(
        self, num_layers: int, shape: StateShape, *, device: torch.device | str = "cpu"
    ) -> None:
        self._num_layers = num_layers
        self._shape = shape
        self._device = device
        self._slots: dict[int, _Slot] = {}

    def tail(self, slot: int, layer: int) -> torch.Tensor:
        """Return the convolution's last inputs `[K - 1, C]`."""
        return self._slots[slot].tails[layer]

    def memory(self, slot: int, layer: int) -> torch.Tensor:
        """Return the delta rule's state `[Hv, D, Dv]`."""
        return self._slots[slot].memories[layer]

    def keep(self, slot: int, layer: int, rows: LayerRows) -> None:
        """Remember a layer's rows until the slot is committed."""
        self._slots[slot].pending[layer] = rows

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Make rows of the last forward, one following the other, part of a slot's state.

        Raises:
            ValueError: No forward came before, or it has other rows that are no draft.
        """
        state = self._slots[slot]
        pending, state.pending = state.pending, {}
        if not path:
            return
        if len(pending) != self._num_layers:
            raise ValueError(f"slot {slot} has no rows to commit")
        for layer, rows in pending.items():
            num_rows = len(rows.inputs)
            num_certain = num_rows if rows.tape is None else num_rows - rows.tape.keys.shape[1]
            if [*path[:num_certain]] != [*range(num_certain)] or path[-1] >= num_rows:
                raise ValueError(
                    f"{len(path)} of {num_rows} rows; the first {num_certain} are certain"
                )
            latest = list(path[-self._shape.tail[0] :])
            state.tails[layer] = tail_after(rows.inputs[latest], state.tails[layer])
            memory = rows.memory
            if rows.tape is not None:
                drafted = [row - num_certain for row in path[num_certain:]]
                memory = gated_delta_advance(memory, rows.tape, drafted)
            state.memories[layer] = memory

    def reset(self, slot: int) -> None:
        """Put a slot into the state of an empty sequence."""
        self._slots[slot] = _Slot(
            [torch.zeros(self._shape.tail, device=self._device) for _ in range(self._num_layers)],
            [torch.zeros(self._shape.memory, device=self._device) for _ in range(self._num_layers)],
        )

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """Copy a slot's state: tails `[L, K - 1, C]` and memories `[L, Hv, D, Dv]`."""
        state = self._slots[slot]
        return torch.stack(state.tails), torch.stack(state.memories)

    def restore(self, slot: int, state: Sequence[torch.Tensor]) -> None:
        """Set a slot's state from `snapshot`, which stays untouched."""
        tails, memories = state
        # A state is replaced as a whole and never written into, so slots may share a snapshot.
        self._slots[slot] = _Slot([*tails.unbind()], [*memories.unbind()])
