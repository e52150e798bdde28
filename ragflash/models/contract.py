"""What the engine asks of a model, whatever its architecture.

`forward` computes rows and writes their keys and values after each sequence's committed length, and
changes nothing else;
only `commit` makes rows part of a sequence. Prefill, decode and draft verification are the same
call with other row counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.kvcache.pages import KVLayout, KVPages, LayerKV


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in a batch.

    Attributes:
        slot: Recurrent-state slot of the sequence; fixed while it lives.
        num_rows: Query rows, >= 1.
        committed: Tokens of the sequence before its first row.
        pages: Exact KV pages in order: that of position 0, then those after the packed ones. With
            these they cover `committed + num_rows` tokens.
        logit_rows: Rows (0-based, within this sequence) whose logits are wanted, ascending.
        num_draft: Last rows that `commit` may leave out; the others are always committed.
        packed_pages: Packed KV pages in order, from position 256 on; every row sees all of them.
        parents: For each row the row before it, a smaller number, -1 for the committed tokens;
            `None` is a chain, and all rows that are no draft are one. Keys and values of row r are
            written behind those of row r - 1 whatever its parent; its position is `committed` and
            the number of rows before it on its path.
    """

    slot: int
    num_rows: int
    committed: int
    pages: tuple[int, ...]
    logit_rows: tuple[int, ...]
    num_draft: int = 0
    packed_pages: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None

    @property
    def num_packed(self) -> int:
        """Tokens in packed pages; a position's place in `pages` comes that much earlier."""
        return len(self.packed_pages) * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of all sequences of a step, one after the other.

    Attributes:
        token_ids: `[N]` int64.
        positions: `[N]` int64, see `SequenceRows.parents`.
        sequences: In row order; `sum(num_rows) == N`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sequences: tuple[SequenceRows, ...]


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """What a model keeps of a sequence.

    Attributes:
        context_tokens: Longest sequence that the model was trained for.
        kv_layers: Of each layer with keys and values.
        state_bytes: State of fixed size.
        tape_bytes: What a drafted row keeps until it is committed.
    """

    context_tokens: int
    kv_layers: tuple[LayerKV, ...]
    state_bytes: int = 0
    tape_bytes: int = 0


class Model(Protocol):
    """One loaded model. Called from the worker thread only."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def context_tokens(self) -> int:
        """Longest sequence that the model was trained for."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """What weights and activations are; norms, softmax and logits are float32 always."""

    @property
    def kv_layout(self) -> KVLayout:
        """Shape of its KV pages; zero layers when it has no attention."""

    @property
    def is_recurrent(self) -> bool:
        """Whether slots carry state that pages do not hold."""

    def forward(self, batch: ForwardBatch, pages: KVPages) -> torch.Tensor:
        """Write every row's K and V; return f32 logits `[R, V]` of the wanted rows, in order."""

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Make rows of the slot's last `forward` part of its state: a path from its first row.

        It has at least all rows that are no draft; called once after a forward, or never when all
        are drafts and none is wanted.

        Args:
            slot: Of the sequence.
            path: Their numbers, ascending: each is the parent of the next.
        """

    def reset(self, slot: int) -> None:
        """Put a slot into the state of an empty sequence."""

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """Copy a slot's recurrent state; empty when the model has none."""

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        """Set a slot's recurrent state from `snapshot`."""


@dataclass(frozen=True, slots=True)
class Tapped:
    """What a forward computed, for who drafts from it.

    Attributes:
        logits: As `Model.forward` returns them.
        stream: All rows behind the last layer, before the last norm, `[N, H]`.
        taps: All rows behind each of the layers asked for, side by side, `[N, taps · H]`.
    """

    logits: torch.Tensor
    stream: torch.Tensor
    taps: torch.Tensor


@runtime_checkable
class TappedModel(Model, Protocol):
    """A model that also gives the rows that drafters read of it."""

    def forward_tapped(
        self, batch: ForwardBatch, pages: KVPages, tap_layers: Sequence[int]
    ) -> Tapped:
        """As `forward`, and keep what stands in the residual stream behind layers, ascending.

        The rows may be overwritten by the next forward.
        """


@runtime_checkable
class GreedyModel(Model, Protocol):
    """A model that also picks the likeliest tokens where it runs."""

    def forward_greedy(
        self,
        batch: ForwardBatch,
        pages: KVPages,
        *,
        goes_on: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """As `forward`, but return where the first largest logit of each wanted row is.

        Args:
            batch: As there.
            pages: As there.
            goes_on: The caller expects to commit all rows and to ask for these tokens' rows next.
                It may do otherwise: a model that begins with them leaves everything as it was but
                rows behind the committed ones.
            meanwhile: Called once, when the rows are being computed and nothing was waited for.
        """


@dataclass(frozen=True, slots=True)
class TappedTokens:
    """As `Tapped`, with tokens as `GreedyModel.forward_greedy` returns them."""

    tokens: list[int]
    stream: torch.Tensor
    taps: torch.Tensor


@runtime_checkable
class GreedyTappedModel(GreedyModel, TappedModel, Protocol):
    """A model that gives rows to drafters and picks the likeliest tokens where it runs."""

    def forward_greedy_tapped(
        self,
        batch: ForwardBatch,
        pages: KVPages,
        tap_layers: Sequence[int],
        *,
        goes_on: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> TappedTokens:
        """As `forward_greedy`, and keep rows as `forward_tapped` does."""
