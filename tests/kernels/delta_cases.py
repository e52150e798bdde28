"""Layers of the gated delta rule with random weights, states and rows."""

import random
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ragflash_kernels.columns import Columns
from ragflash_kernels.gated_delta import DeltaSizes, DeltaStates
from tests.kernels.guarded import GuardedMemory

TOY = DeltaSizes(key_heads=1, value_heads=2, key_dim=32, value_dim=16, conv_width=4)
REAL = DeltaSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_width=4)


@dataclass(frozen=True)
class Layer:
    """Weights, and columns of a product that has others too."""

    sizes: DeltaSizes
    conv: torch.Tensor
    decay_rate: torch.Tensor
    decay_bias: torch.Tensor

    @classmethod
    def random(cls, sizes: DeltaSizes, device="cpu", seed: int = 0) -> "Layer":
        generator = torch.Generator().manual_seed(seed)
        heads = sizes.value_heads
        return cls(
            sizes,
            (torch.randn(sizes.channels, sizes.conv_width, generator=generator) / 2).to(device),
            -torch.rand(heads, generator=generator).to(device),
            torch.randn(heads, generator=generator).to(device),
        )

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("conv", "decay_rate", "decay_bias")}

    def columns(self, num_rows: int, parts: int = 3, seed: int = 0, dtype=torch.float32) -> tuple:
        """Return random Q, K and V, steps and decay of rows, among 7 columns of something else."""
        heads = self.sizes.value_heads
        generator = torch.Generator().manual_seed(seed)
        shape = (parts, num_rows, 7 + self.sizes.channels + 2 * heads)
        product = torch.randn(shape, generator=generator).to(self.conv.device, dtype)
        return Columns.whole(product).split(7, self.sizes.channels, heads, heads)[1:]

    def states(self, layers: int = 1, slots: int = 3, seed: int = 0) -> DeltaStates:
        """Return random states."""
        generator = torch.Generator().manual_seed(seed)
        device = self.conv.device
        states = DeltaStates.allocate(self.sizes, layers=layers, slots=slots, device=device)
        memories, tails = (
            torch.randn(x.shape, generator=generator).to(device)
            for x in (states.memories, states.tails)
        )
        return replace(states, memories=memories, tails=tails)

    def by_rows(self, columns: tuple, memory: torch.Tensor, tail: torch.Tensor) -> tuple:
        """The equations, row after row in float64: heads of rows, memory and tail after them."""
        sizes = self.sizes
        x, beta, alpha = (
            c.partials[:, :, c.start : c.start + c.width].double().sum(0) for c in columns
        )
        inputs = torch.cat((tail.double(), x))
        taps = self.conv.double().unbind(1)
        mixed = functional.silu(sum(inputs[t : t + len(x)] * tap for t, tap in enumerate(taps)))
        keys = sizes.key_heads * sizes.key_dim
        q, k = (
            part.view(len(x), -1, sizes.key_dim).repeat(1, sizes.value_heads // sizes.key_heads, 1)
            for part in mixed[:, : 2 * keys].split(keys, 1)
        )
        q, k = (part / (part.square().sum(2, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        v = mixed[:, 2 * keys :].view(len(x), -1, sizes.value_dim)
        decay = (self.decay_rate * functional.softplus(alpha + self.decay_bias)).exp()
        memory, out = memory.double(), []
        for t in range(len(x)):
            memory = memory * decay[t, :, None, None]
            read = (k[t, :, None] @ memory)[:, 0]
            correction = beta[t].sigmoid()[:, None] * (v[t] - read)
            memory = memory + k[t, :, :, None] * correction[:, None]
            out.append((q[t, :, None] @ memory)[:, 0] * sizes.key_dim**-0.5)
        return torch.stack(out), memory, inputs[len(x) :]

    def by_tree(self, columns: tuple, parents, memory: torch.Tensor, tail: torch.Tensor):
        """Heads of rows, each by the equations of the rows on its path."""
        paths = [path_to(row, parents) for row in range(len(parents))]
        found = [self.by_rows(pick_rows(columns, path), memory, tail)[0] for path in paths]
        return torch.stack([heads[-1] for heads in found])


def random_tree(num_rows: int, spread: int, seed: int = 0) -> list[int]:
    """Parents at most so many rows back; the first row has none, others may have none."""
    rng = random.Random(seed)
    return [rng.randint(max(-1, row - spread), row - 1) for row in range(num_rows)]


def path_to(row: int, parents) -> list[int]:
    return [*path_to(parents[row], parents), row] if row >= 0 else []


def pick_rows(columns: tuple, rows: list[int]) -> tuple:
    return tuple(replace(x, partials=x.partials[:, rows]) for x in columns)


def rows_of(columns: tuple, first: int, end: int) -> tuple:
    return tuple(replace(x, partials=x.partials[:, first:end]) for x in columns)


def copy_states(states: DeltaStates) -> DeltaStates:
    return DeltaStates(*(getattr(states, name).clone() for name in DeltaStates.__slots__))


def int32(*values: int, device="cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def guard_states(states: DeltaStates, guard: GuardedMemory) -> DeltaStates:
    """Return the states between red zones, their tapes poisoned."""
    names = DeltaStates.__slots__
    placed = {name: guard.place(getattr(states, name)) for name in names[:2]}
    tapes = {
        name: guard.empty(getattr(states, name).shape, device=states.tails.device)
        for name in names[2:]
    }
    return DeltaStates(**placed, **tapes)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are equal, those of poison too."""
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))
