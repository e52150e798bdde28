"""One sequence's context of a drafter, wherever it is kept."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ragflash.models.dflash.config import MAX_CANDIDATES, DFlashConfig
from ragflash.models.dflash.ring import Ring


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a drafter says of the tokens behind a pending one.

    Slots are predicted side by side: the probabilities of one do not depend on the tokens chosen
    in those before it. Whatever is proposed from them is verified as a one-point distribution.

    Attributes:
        token_ids: `[S, K]` int64, each slot's most probable tokens, the best first.
        log_probs: Theirs among the whole vocabulary, `[S, K]` float32.
        chain: One token a slot: the most probable, or in DFlash 2 the selector's choice.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    chain: tuple[int, ...]


class DraftContext(ABC):
    """Features are appended for tokens that the target has committed, never for rejected ones.

    The pending token, sampled and not yet computed, has none.

    Args:
        config: Of the drafter.
        ring: Where keys and values of the features are kept.
    """

    def __init__(self, config: DFlashConfig, ring: Ring) -> None:
        self._config = config
        self._kept = ring

    @property
    def most_tokens(self) -> int:
        """Slots that are predicted at most."""
        return self._config.block_size - 1

    @property
    def position(self) -> int:
        """Of the token whose features come next, which is the pending one's."""
        return self._kept.end

    def append(self, features: torch.Tensor) -> None:
        """Take the features `[N, taps · H]`, N ≥ 1, of the tokens from `position` on.

        Those that would not stay in the ring cost nothing; a long prompt may leave them out with
        `restart` instead.
        """
        kept = features[-self._kept.num_tokens :]
        if len(kept) < len(features):
            self._kept.restart(self._kept.end + len(features) - len(kept))
        self._append(kept)

    def draft(self, pending: int, position: int, width: int, top_k: int = 8) -> Candidates:
        """Predict the tokens behind the pending one, in one pass.

        Args:
            pending: The newest token.
            position: Its position.
            width: Slots to predict, 1 to `most_tokens`.
            top_k: Tokens a slot, up to 16; DFlash 2 returns at least as many as its selector sees.

        Raises:
            ValueError: An argument is outside its range, or features of tokens before the pending
                one are missing.
        """
        if position != self.position:
            raise ValueError(f"features end at {self.position}, the pending token is at {position}")
        if not 1 <= width <= self.most_tokens:
            raise ValueError(f"{width} slots: blocks of {self._config.block_size} rows")
        if not 1 <= top_k <= MAX_CANDIDATES:
            raise ValueError(f"top_k = {top_k} is not within 1…{MAX_CANDIDATES}")
        return self._draft(pending, width, top_k)

    def truncate(self, position: int) -> None:
        """Forget the features of tokens from a position on."""
        self._kept.truncate(position)

    def restart(self, position: int) -> None:
        """Forget all features; the next are those of the token at a position."""
        self._kept.restart(position)

    def export(self) -> bytes:
        """Return the state, so that a sequence that `load`s it drafts the same."""
        return self._kept.export()

    def load(self, state: bytes) -> None:
        """Take over a state; raises `ValueError` for one of another drafter."""
        self._kept.load(state)

    @abstractmethod
    def _append(self, features: torch.Tensor) -> None:
        """Make keys and values of features that the ring has room for."""

    @abstractmethod
    def _draft(self, pending: int, width: int, top_k: int) -> Candidates:
        """See `draft`; the arguments are in their ranges."""
