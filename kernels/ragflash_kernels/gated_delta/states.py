"""What a card keeps of every sequence for the layers of the gated delta rule."""

from dataclasses import dataclass, fields
from math import prod

import torch

MAX_TAPE_ROWS = 32


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads of a layer.

    Attributes:
        key_heads: Of Q and K; value head `i` reads key head `i mod key_heads`.
        value_heads: Of V, of the output and of the memory.
        key_dim: Values of a head of Q and K.
        value_dim: Values of a head of V.
        conv_width: Rows that the convolution weighs, the newest included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """What is convolved: Q, K and V side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """Memories, and a tape of what the last few rows would do to them; all float32.

    A step writes the tape and changes nothing else; `delta_commit` applies rows of it.
    All sizes begin with `[L, slots]`, those of one layer, as `layer` gives them, with `[slots]`.

    Attributes:
        memories: `[…, Hv, D, Dv]`.
        tails: The convolution's last inputs, `[…, K - 1, C]`.
        inputs: Tape: inputs of the convolution, `[…, R, C]`.
        keys: Tape: of length 1, `[…, R, Hk, D]`.
        corrections: Tape: what a row adds at its key, `[…, R, Hv, Dv]`.
        decay: Tape: the factor that a row leaves of what was there, `[…, R, Hv]`.
    """

    memories: torch.Tensor
    tails: torch.Tensor
    inputs: torch.Tensor
    keys: torch.Tensor
    corrections: torch.Tensor
    decay: torch.Tensor

    @classmethod
    def allocate(
        cls,
        sizes: DeltaSizes,
        *,
        layers: int,
        slots: int,
        device: torch.device | str,
        rows: int = MAX_TAPE_ROWS,
    ) -> "DeltaStates":
        """Return states of empty sequences, with tapes of so many rows."""
        heads, dim, value_dim = sizes.value_heads, sizes.key_dim, sizes.value_dim

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros((layers, slots, *shape), device=device)

        return cls(
            zeros(heads, dim, value_dim),
            zeros(sizes.conv_width - 1, sizes.channels),
            zeros(rows, sizes.channels),
            zeros(rows, sizes.key_heads, dim),
            zeros(rows, heads, value_dim),
            zeros(rows, heads),
        )

    @property
    def sizes(self) -> DeltaSizes:
        """Sizes of a layer's heads."""
        heads, key_dim, value_dim = self.memories.shape[-3:]
        return DeltaSizes(self.keys.shape[-2], heads, key_dim, value_dim, self.tails.shape[-2] + 1)

    @property
    def rows(self) -> int:
        """Rows that the tape of a sequence has room for."""
        return self.decay.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(x.shape) * x.element_size() for x in self._tensors())

    def layer(self, index: int) -> "DeltaStates":
        """Return views of one layer's states, without the dimension of layers."""
        return DeltaStates(*(x[index] for x in self._tensors()))

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))
