"""What a DFlash drafter is, whatever its file calls it (Z Lab 2026, arXiv:2602.06036)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Self

import torch

from ragflash.errors import ModelError
from ragflash.models.decoder import Decoder
from ragflash.models.device.matrices import gathered
from ragflash.models.linear import PackedEmbedding

MAX_CANDIDATES = 16


class Causality(StrEnum):
    """In which layers a row of the block sees only itself and the rows before it."""

    NEVER = "never"
    SLIDING = "sliding"  # in layers with a window
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """The dynamic convolution of DFlash 2.

    Attributes:
        num_taps: Rows of the block that it adds up, the current one included.
        group_size: Neighbouring channels that share the part computed from the row.
    """

    num_taps: int
    group_size: int


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """What picks a path through the candidates in DFlash 2.

    Attributes:
        rank: Values a token has in its two tables.
        top_k: Candidates a slot.
    """

    rank: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for, as far as a drafter needs it.

    Attributes:
        num_layers: Of its trunk.
        hidden_size: Width of its residual stream.
        vocab_size: Width of its logits.
        embed: Token ids `[N]` to rows of its table `[N, H]`, as they are stored.
        logits: Hidden rows `[N, H]` after the drafter's last norm to float32 logits `[N, V]`
            through the target's head, soft cap included.
        soft_cap: Of these logits.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]
    soft_cap: float | None = None

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Describe a loaded model."""
        parts = decoder.parts
        embed: Callable[[torch.Tensor], torch.Tensor] = parts.embedding
        if isinstance(parts.embedding, PackedEmbedding):  # a card's, in the host's memory
            embed = partial(gathered, parts.embedding)
        return cls(
            num_layers=len(parts.blocks),
            hidden_size=parts.norm.weight.numel(),
            vocab_size=decoder.vocab_size,
            embed=embed,
            logits=decoder.logits,
            soft_cap=parts.soft_cap,
        )


@dataclass(frozen=True, slots=True)
class Given:
    """What the caller knows of a drafter; each value that is not `None` goes before the file's.

    Attributes:
        windows: For each layer the newest positions that a row sees, `None` for all.
        causality: See `Causality`.
        tap_layers: See `DFlashConfig`.
        embedding_scale: See `DFlashConfig`.
    """

    windows: tuple[int | None, ...] | None = None
    causality: Causality | None = None
    tap_layers: tuple[int, ...] | None = None
    embedding_scale: float | None = None


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and constants of a drafter.

    Attributes:
        hidden_size: Of the drafter and of its target.
        ffn_size: Of the feed-forward parts.
        num_heads: Query heads.
        num_kv_heads: Heads of K, and of V.
        head_dim: Values a head; all rotate.
        norm_eps: Of every norm.
        rope_theta: Base of the angles.
        windows: For each layer the newest positions that a row sees, `None` for all.
        causality: See `Causality`.
        block_size: Rows that it was trained on: the pending token and the masks after it.
        mask_token_id: Stands for a token to be predicted.
        tap_layers: Layers of the target, from 0 and ascending, whose outputs (the residual stream
            behind them) are its features, side by side in this order.
        embedding_scale: Factor of the token vectors.
        output_scale: Factor of the last hidden rows.
        soft_cap: That of the logits it was trained with, if its file has one.
        conv: DFlash 2 only.
        selector: DFlash 2 only.
    """

    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    windows: tuple[int | None, ...]
    causality: Causality
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    embedding_scale: float = 1.0
    output_scale: float = 1.0
    soft_cap: float | None = None
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the drafter."""
        return len(self.windows)

    @property
    def feature_size(self) -> int:
        """Values of all taps of a token."""
        return len(self.tap_layers) * self.hidden_size

    def is_causal(self, layer: int) -> bool:
        """Whether rows of the block do not see those after them in a layer."""
        if self.causality is Causality.SLIDING:
            return self.windows[layer] is not None
        return self.causality is Causality.ALWAYS

    def require_fit(self, target: Target) -> None:
        """Refuse values that contradict each other or the target.

        Raises:
            ModelError: Says which.
        """
        for fault, holds in (
            (f"blocks of {self.block_size} rows draft nothing", self.block_size < 2),
            (
                f"heads {self.num_heads}/{self.num_kv_heads} of {self.head_dim} values cannot be "
                "shared out or rotated in pairs",
                self.num_heads % self.num_kv_heads != 0 or self.head_dim % 2 != 0,
            ),
            (
                f"its hidden size is {self.hidden_size}, the target's {target.hidden_size}",
                self.hidden_size != target.hidden_size,
            ),
            (
                f"mask token {self.mask_token_id} is not among the target's {target.vocab_size}",
                not 0 <= self.mask_token_id < target.vocab_size,
            ),
            (
                f"its logits are capped at {self.soft_cap}, the target's at {target.soft_cap}",
                self.soft_cap is not None and self.soft_cap != target.soft_cap,
            ),
            (
                f"{self.hidden_size} channels cannot be grouped by {self.conv}",
                self.conv is not None and self.hidden_size % self.conv.group_size != 0,
            ),
            (
                f"{self.selector} has more than {MAX_CANDIDATES} candidates a slot",
                self.selector is not None and self.selector.top_k > MAX_CANDIDATES,
            ),
        ):
            if holds:
                raise ModelError(f"this drafter cannot be used: {fault}")
        require_taps(self.tap_layers, target.num_layers)


def require_taps(taps: Sequence[int], num_target_layers: int) -> None:
    """Refuse layer numbers that a target does not have, or that were counted differently.

    Raises:
        ModelError: They are not ascending layers of the target, or are those of every published
            drafter of this many taps minus one, hence were shifted once too often.
    """
    ascending = all(a < b for a, b in pairwise(taps))
    if not taps or not ascending or taps[0] < 0 or taps[-1] >= num_target_layers:
        raise ModelError(
            f"the drafter reads the target behind layers {list(taps)}, which are not ascending "
            f"numbers below {num_target_layers}: it belongs to another target"
        )
    if len(taps) > 1 and tuple(tap + 1 for tap in taps) == evenly_spaced(
        num_target_layers, len(taps)
    ):
        raise ModelError(
            f"the drafter reads the target behind layers {list(taps)}, one too early each: its "
            "file counts them from 0 where its architecture counts from 1; pass `tap_layers`"
        )


def evenly_spaced(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return the taps that Z Lab's code chooses: from layer 1 to the third last, at least two."""
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
