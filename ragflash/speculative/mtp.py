"""Drafts of a model's own block of multi-token prediction, as chains."""

import struct
from collections.abc import Sequence
from typing import Protocol

import torch

from ragflash.models.mtp import MtpHead
from ragflash.speculative.drafter import Draft
from ragflash.speculative.policy import Idle

SOURCE = "mtp"
MAX_DEPTH = 4

_STATE = struct.Struct("<8s2q")
_MAGIC = b"MTPCARRY"


class BlockRunner(Protocol):
    """Runs the block for one sequence, over the pages that are its target's too."""

    def __call__(
        self, hidden: torch.Tensor, token_ids: Sequence[int], position: int
    ) -> torch.Tensor:
        """Return the block's hidden rows `[N, H]`.

        Args:
            hidden: `[N, H]`, each of the token before the one in `token_ids`.
            token_ids: Tokens.
            position: Of the first of them; the block's keys and values are kept at theirs.
        """


class MtpDrafter:
    """See `RowDrafter`; proposes nothing while tokens before the newest are not computed.

    The block's row of a token needs the hidden row of the token before. That of the newest token
    is therefore carried from one chunk to the next, and is all the state there is beside the pages;
    the first token has zeros before it. So a page never depends on the token after it, and pages
    that sequences share are never written. Pages that come without that state have no keys and
    values of the block: nothing is proposed behind them.

    Args:
        head: The block.
        run_block: Of the sequence that this drafts for.
        dtype: Of the target's rows.
        depth: Tokens to propose at most.

    Attributes:
        source: See `Draft`.
        most_tokens: Of a proposal.
    """

    source = SOURCE

    def __init__(
        self, head: MtpHead, run_block: BlockRunner, dtype: torch.dtype, depth: int = MAX_DEPTH
    ) -> None:
        self._head = head
        self._run_block = run_block
        self.most_tokens = depth
        self._nothing = torch.zeros_like(head.hidden_norm.weight, dtype=dtype)[None]
        self._carried = self._nothing
        self._position: int | None = 0

    @property
    def position(self) -> int | None:
        """See `RowDrafter`."""
        return self._position

    def absorb(self, position: int, token_ids: Sequence[int], rows: torch.Tensor) -> None:
        """See `RowDrafter`; the rows are what the block reads of the target (`MtpHead.hidden`)."""
        if position == 0:
            self._carried = self._nothing
        elif position != self._position:
            self._position = None
            return
        self._run_block(torch.cat((self._carried, rows[:-1])), token_ids, position)
        self._carried = rows[-1:].clone()
        self._position = position + len(rows)

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        if self._position != len(history) - 1:
            return Draft((), SOURCE, reason=Idle.NO_CONTEXT)
        drafted: list[int] = []
        hidden, token_id = self._carried, history[-1]
        for position in range(self._position, self._position + min(budget, self.most_tokens)):
            hidden = self._run_block(hidden, [token_id], position)
            token_id = int(self._head.logits(hidden)[0].argmax())
            drafted.append(token_id)
        return Draft(tuple(drafted), SOURCE)

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Nothing: rows come of what was committed, not of what was proposed."""

    def export_state(self) -> bytes:
        """See `Drafter`; float32, which holds every dtype that is computed in.

        Raises:
            ValueError: There is no state, as `position` says.
        """
        if self._position is None:
            raise ValueError("tokens went by whose rows were not seen")
        row = self._carried.float().cpu().numpy()
        return _STATE.pack(_MAGIC, self._position, row.size) + row.tobytes()

    def load_state(self, state: bytes) -> None:
        """See `Drafter`."""
        width = self._nothing.shape[1]
        if len(state) != _STATE.size + 4 * width or state[: len(_MAGIC)] != _MAGIC:
            raise ValueError("the stored state is not of this block of multi-token prediction")
        _, self._position, _ = _STATE.unpack_from(state)
        row = torch.frombuffer(bytearray(state), dtype=torch.float32, offset=_STATE.size)
        self._carried = row[None].to(self._nothing)
