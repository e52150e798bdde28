"""What all decoder models share: embedding, blocks, last norm, head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragflash.kvcache.pages import KVLayout, KVPages
from ragflash.models.contract import ForwardBatch, Model, Tapped
from ragflash.models.layers import Angles, Mixer, Norm, Step
from ragflash.models.linear import Embedding, Linear, PackedEmbedding
from ragflash.models.metadata import Metadata
from ragflash.models.mtp import MtpHead
from ragflash.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Everything between token ids and logits.

    Attributes:
        embedding: Token vectors.
        blocks: In order.
        norm: Before the head.
        head: Gives logits.
        frequencies: Angle a position of each rotated pair, `[F]` float32, for each set that blocks
            choose from.
        embedding_scale: Factor of the token vectors.
        soft_cap: Logits become `c · tanh(logits / c)`; `None` leaves them.
    """

    embedding: Embedding | PackedEmbedding
    blocks: tuple[Mixer, ...]
    norm: Norm
    head: Linear
    frequencies: tuple[torch.Tensor, ...]
    embedding_scale: float = 1.0
    soft_cap: float | None = None


class Decoder(Model):
    """A model without state beside its pages; subclasses read a file's parts.

    Args:
        parts: See `DecoderParts`.
        vocab_size: Width of the logits.
        context_tokens: Longest sequence that the file allows.
        kv_layout: Of the blocks' attention; its dtype is what is computed in.

    Attributes:
        mtp: Its block of multi-token prediction, if it has one; the last of `kv_layout` is its.
    """

    mtp: MtpHead | None = None

    def __init__(
        self, parts: DecoderParts, *, vocab_size: int, context_tokens: int, kv_layout: KVLayout
    ) -> None:
        self.parts = parts
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._kv_layout = kv_layout

    @property
    def vocab_size(self) -> int:
        """See `Model`."""
        return self._vocab_size

    @property
    def context_tokens(self) -> int:
        """See `Model`."""
        return self._context_tokens

    @property
    def compute_dtype(self) -> torch.dtype:
        """See `Model`."""
        return self._kv_layout.dtype

    @property
    def kv_layout(self) -> KVLayout:
        """See `Model`."""
        return self._kv_layout

    @property
    def is_recurrent(self) -> bool:
        """See `Model`."""
        return False

    def forward(self, batch: ForwardBatch, pages: KVPages) -> torch.Tensor:
        """See `Model`."""
        step = self.step(batch, pages)
        return self.logits(self.final_hidden(step, step.logit_rows()))

    @torch.no_grad()
    def step(self, batch: ForwardBatch, pages: KVPages) -> Step:
        """Work out what all layers need to know of a batch."""
        positions = batch.positions[:, None].float()
        return Step(batch, pages, tuple(_angles(positions, f) for f in self.parts.frequencies))

    def embed(self, step: Step) -> tuple[torch.Tensor, Step]:
        """Return the rows' token vectors `[N, H]`, and the step with what blocks need of them."""
        x = self.parts.embedding(step.batch.token_ids)
        return (x if self.parts.embedding_scale == 1.0 else x * self.parts.embedding_scale), step

    @torch.no_grad()
    def final_hidden(self, step: Step, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run all blocks; return the wanted rows, or all, after the last norm, `[R, H]`."""
        x, _ = self._streams(step)
        return self.parts.norm(x if wanted is None else x[wanted])

    @torch.no_grad()
    def forward_tapped(
        self, batch: ForwardBatch, pages: KVPages, tap_layers: Sequence[int]
    ) -> Tapped:
        """See `TappedModel`."""
        step = self.step(batch, pages)
        x, taps = self._streams(step, tap_layers)
        logits = self.logits(self.parts.norm(x[step.logit_rows()]))
        return Tapped(logits, x, torch.cat(taps, dim=-1) if taps else x[:, :0])

    def _streams(
        self, step: Step, tap_layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run all blocks; return the stream behind the last, and behind some, `[N, H]` each."""
        x, step = self.embed(step)
        taps = []
        for layer, block in enumerate(self.parts.blocks):
            x = block(x, step)
            if layer in tap_layers:
                taps.append(x)
        return x, taps

    @torch.no_grad()
    def logits(self, final_hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[R, V]` of rows that `final_hidden` returned."""
        logits = self.parts.head(final_hidden).float()
        cap = self.parts.soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Nothing: all state is in pages."""

    def reset(self, slot: int) -> None:
        """Nothing: all state is in pages."""

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """Return nothing: all state is in pages."""
        return ()

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        """Nothing: all state is in pages."""


def read_tables(
    reader: WeightReader, metadata: Metadata, hidden_size: int
) -> tuple[Embedding | PackedEmbedding, Linear]:
    """Read the embedding and the head, which are one tensor in files without `output.weight`."""
    vocab_size = metadata.vocab_size()
    embedding = reader.embedding("token_embd.weight", vocab_size, hidden_size)
    if reader.has("output.weight"):
        return embedding, reader.linear(
            ["output.weight"], in_features=hidden_size, out_features=[vocab_size]
        )
    return embedding, reader.tied_head(embedding)


def inverse_frequencies(theta: float, rotated_dim: int) -> torch.Tensor:
    """Angle a position of pair `j`, `theta ** (-2j / rotated_dim)`, `[rotated_dim / 2]` float32."""
    exponents = torch.arange(0, rotated_dim, 2).double() / rotated_dim
    return (theta**-exponents).float()


def _angles(positions: torch.Tensor, frequencies: torch.Tensor) -> Angles:
    angles = positions * frequencies
    return angles.cos(), angles.sin()
