"""Parts that architectures are put together from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn import functional

from ragflash.kvcache.pages import KVPages
from ragflash.models.contract import ForwardBatch, SequenceRows
from ragflash.models.linear import Linear
from ragflash.models.recurrent import SlotStates
from ragflash_kernels.paged_attention import paged_attention
from ragflash_kernels.rms_norm import rms_norm
from ragflash_kernels.rope import rope

Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [N, F] each
Activation = Callable[[torch.Tensor], torch.Tensor]
Mixer = Callable[[torch.Tensor, "Step"], torch.Tensor]  # [N, H] to [N, H]


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward sees.

    Attributes:
        batch: Its rows.
        pages: Keys and values.
        angles: Of the rows' positions, one entry for each set of frequencies of the model.
        states: Of the sequences' slots; `None` when the model has none.
        layer_inputs: What token ids give to each layer directly, `[N, layers, P]`; `None` when
            the model has none.
    """

    batch: ForwardBatch
    pages: KVPages
    angles: tuple[Angles, ...]
    states: SlotStates | None = None
    layer_inputs: torch.Tensor | None = None

    def sequences(self) -> Iterator[tuple[SequenceRows, slice]]:
        """Each sequence and where its rows stand in the batch."""
        ends = accumulate(rows.num_rows for rows in self.batch.sequences)
        for rows, end in zip(self.batch.sequences, ends, strict=True):
            yield rows, slice(end - rows.num_rows, end)

    def logit_rows(self) -> torch.Tensor:
        """Rows of the batch whose logits are wanted."""
        wanted = [at.start + row for rows, at in self.sequences() for row in rows.logit_rows]
        return torch.tensor(wanted, dtype=torch.int64, device=self.batch.token_ids.device)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS normalisation of the last dimension by a float32 weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` normalised, in its own dtype."""
        return rms_norm(x, self.weight, eps=self.eps)


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's keys and values, and how they are attended to.

    Attributes:
        layer: Its number in the pages.
        scale: Of the scores.
        window: Newest tokens that a row sees, itself included; `None` for all.
    """

    layer: int
    scale: float
    window: int | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step) -> torch.Tensor:
        """Store K and V `[N, Hkv, D]` of every row; return the mixtures `[N, Hq · D]` for `q`."""
        self.store(k, v, step)
        return self.read(q, step)

    def store(self, k: torch.Tensor, v: torch.Tensor, step: Step) -> None:
        """Write K and V `[N, Hkv, D]` of every row."""
        for rows, at in step.sequences():
            first = rows.committed - rows.num_packed
            step.pages.exact.write(self.layer, rows.pages, first, k[at], v[at])

    def read(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the mixtures `[N, Hq · D]` for `q` `[N, Hq, D]` of what is stored."""
        if step.pages.packed is not None:
            parts = [self._read_in_order(q[at], rows, step.pages) for rows, at in step.sequences()]
            return torch.cat(parts).flatten(1)
        keys, values = step.pages.exact.keys(self.layer), step.pages.exact.values(self.layer)
        return self._mix(q, keys, values, step.batch.sequences).flatten(1)

    def _read_in_order(self, q: torch.Tensor, rows: SequenceRows, pages: KVPages) -> torch.Tensor:
        """Attend to one sequence's pages of both forms, unpacked and copied side by side."""
        keys, values = pages.in_order(self.layer, rows.pages, rows.packed_pages)
        in_order = replace(rows, pages=tuple(range(len(keys))), packed_pages=())
        return self._mix(q, keys, values, (in_order,))

    def _mix(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sequences: Sequence[SequenceRows],
    ) -> torch.Tensor:
        return paged_attention(
            q, keys, values, sequences=sequences, scale=self.scale, window=self.window
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions.

    Attributes:
        qkv: Gives all heads side by side, Q before K before V.
        output: Of the mixed heads.
        kv: Its pages.
        num_heads: Query heads.
        num_kv_heads: Heads of K, and of V.
        head_dim: Values a head.
        rotary: Which angles of the step it takes.
        q_norm: Of each query head before rotation.
        k_norm: Of each key head before rotation.
    """

    qkv: Linear
    output: Linear
    kv: PagedKV
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: int = 0
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """Mix the rows of every sequence; see `Mixer`."""
        heads = self.qkv(h).view(len(h), -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
            rotated = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        rotated = rope(rotated, *step.angles[self.rotary])
        q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        return self.output(self.kv.attend(q, k, v, step))


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x · sigmoid(x)`."""
    return functional.silu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return functional.gelu(x, approximate="tanh")


@dataclass(frozen=True, slots=True)
class GatedFFN:
    """`down(activation(gate x) · up x)` (Shazeer 2020, arXiv:2002.05202)."""

    gate_up: Linear
    down: Linear
    activation: Activation = silu

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Map `[N, H]` to `[N, H]`."""
        gate, up = self.gate_up(h).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class Block:
    """A pre-norm layer: mixer and feed-forward part, each added to its input."""

    mixer_norm: Norm
    mixer: Mixer
    ffn_norm: Norm
    ffn: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """See `Mixer`."""
        x = x + self.mixer(self.mixer_norm(x), step)
        return x + self.ffn(self.ffn_norm(x))


@dataclass(frozen=True, slots=True)
class SandwichBlock:
    """A layer that also normalises what mixer and feed-forward part give.

    Attributes:
        mixer_norm: Before the mixer.
        mixer: Of rows with each other.
        mixer_post_norm: After it.
        ffn_norm: Before the feed-forward part.
        ffn: Of each row alone.
        ffn_post_norm: After it.
        scale: Factor of the layer's output.
    """

    mixer_norm: Norm
    mixer: Mixer
    mixer_post_norm: Norm
    ffn_norm: Norm
    ffn: Callable[[torch.Tensor], torch.Tensor]
    ffn_post_norm: Norm
    scale: float = 1.0

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """See `Mixer`."""
        x = x + self.mixer_post_norm(self.mixer(self.mixer_norm(x), step))
        x = x + self.ffn_post_norm(self.ffn(self.ffn_norm(x)))
        return x if self.scale == 1.0 else x * self.scale
