"""Tokens that a card chose, on their way to the host."""

from dataclasses import dataclass, replace

import torch

from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.models.contract import SequenceRows

_UNDER_WAY = 2  # a step's, and those of the step that was begun before they were read


@dataclass(frozen=True, slots=True)
class Predictions:
    """What rows predict.

    Attributes:
        logits: float32 `[R, V]`.
        tokens: int32 `[R]`, where the first largest of each is.
    """

    logits: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class SentTokens:
    """Tokens that arrive when all that was launched before them is done."""

    stage: torch.Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> list[int]:
        """Wait for them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[int] = self.stage.tolist()
        return numbers


class TokenSender:
    """Copies int32 tokens to pinned memory; two copies may wait to be read.

    Args:
        max_tokens: Of a copy.
        device: Where they come from.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self._stages = [
            torch.empty(max_tokens, dtype=torch.int32, pin_memory=on_card)
            for _ in range(_UNDER_WAY)
        ]
        self._arrived: list[torch.cuda.Event | None] = [
            torch.cuda.Event() if on_card else None  # type: ignore[no-untyped-call]
            for _ in range(_UNDER_WAY)
        ]
        self._turn = 0

    def send(self, tokens: torch.Tensor) -> SentTokens:
        """Launch the copy of `[R]` tokens."""
        self._turn = (self._turn + 1) % _UNDER_WAY
        stage, arrived = self._stages[self._turn][: len(tokens)], self._arrived[self._turn]
        stage.copy_(tokens, non_blocking=True)
        if arrived is not None:
            arrived.record()
        return SentTokens(stage, arrived)


@dataclass(frozen=True, slots=True)
class StepAhead:
    """A step that was begun before anybody asked for it.

    Attributes:
        token_ids: What its rows are the tokens of.
        sequences: Its rows.
        chosen: The tokens after them, on the card.
        sent: The same, on their way.
    """

    token_ids: list[int]
    sequences: tuple[SequenceRows, ...]
    chosen: torch.Tensor
    sent: SentTokens


def next_rows(sequences: tuple[SequenceRows, ...]) -> tuple[SequenceRows, ...] | None:
    """Return the rows of the tokens after those of a step; `None` where pages do not tell.

    That is where a sequence's next token begins a page, or where not exactly its last row has a
    next token.
    """
    following = []
    for rows in sequences:
        committed = rows.committed + rows.num_rows
        is_told = rows.logit_rows == (rows.num_rows - 1,) and rows.num_draft == 0
        if not is_told or committed % PAGE_TOKENS == 0:
            return None
        after = replace(rows, num_rows=1, committed=committed, logit_rows=(0,))
        following.append(after)
    return tuple(following)
