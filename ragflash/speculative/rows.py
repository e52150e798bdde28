"""The contract of a drafter that reads rows of the target, beside the tokens."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ragflash.speculative.drafter import Drafter


class RowDrafter(Drafter, Protocol):
    """Is given rows of tokens as soon as they are committed, so that nobody keeps a prompt's."""

    @property
    def source(self) -> str:
        """See `Draft.source`."""

    @property
    def most_tokens(self) -> int:
        """Of a proposal."""

    @property
    def position(self) -> int | None:
        """Of the token whose row comes next; `None` when too little is known to draft from."""

    def absorb(self, position: int, token_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Take what the target computed of tokens.

        Positions go on where they ended, except over tokens that were not computed since their
        keys and values were stored, or back to tokens that are computed anew.

        Args:
            position: Of the first token.
            token_ids: Committed tokens, at least one.
            rows: `[N, …]`, what this drafter reads of the target.
        """
