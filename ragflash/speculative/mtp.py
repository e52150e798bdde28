"""Drafts of a model's own block of multi-token prediction, as chains."""

import struct
from collections.abc import Callable, Sequence

import torch

from ragflash.models.contract import SequenceRows
from ragflash.models.mtp import MAX_DEPTH
from ragflash.models.mtp_runner import MtpRunner
from ragflash.speculative.drafter import Draft
from ragflash.speculative.policy import Idle

SOURCE = "mtp"

_STATE = struct.Struct("<8s2q")
_MAGIC = b"MTPROW02"

RowsOf = Callable[[int, int], SequenceRows]  # of a sequence, from a position on, and how many


class MtpDrafter:
    """See `RowDrafter`; proposes nothing while tokens before the newest are not computed.

    The block's row of a token needs the target's row of the token before. That of the newest token
    is therefore carried from one chunk to the next, and is all the state there is beside the pages;
    the first token has zeros before it. So a page never depends on the token after it, and pages
    that sequences share are never written. Pages that come without that state have no keys and
    values of the block: nothing is proposed behind them.

    Args:
        block: Runs the block over the target's pages.
        rows_of: The sequence that this drafts for.
        depth: Tokens to propose at most.

    Attributes:
        source: See `Draft`.
        most_tokens: Of a proposal.
    """

    source = SOURCE

    def __init__(self, block: MtpRunner, rows_of: RowsOf, depth: int = MAX_DEPTH) -> None:
        self._block = block
        self._rows_of = rows_of
        self.most_tokens = min(depth, MAX_DEPTH)
        self._nothing = block.nothing
        self._carried = self._nothing
        self._position: int | None = 0

    @property
    def position(self) -> int | None:
        """See `RowDrafter`."""
        return self._position

    def absorb(self, position: int, token_ids: Sequence[int], rows: torch.Tensor) -> None:
        """See `RowDrafter`; the rows are those of the target's stream behind its last layer."""
        if position == 0:
            self._carried = self._nothing
        elif position != self._position:
            self._position = None
            return
        before = torch.cat((self._carried, rows[:-1]))
        self._block.absorb(before, token_ids, self._rows_of(position, len(rows)))
        self._carried = rows[-1:].clone()
        self._position = position + len(rows)

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        if self._position != len(history) - 1:
            return Draft((), SOURCE, reason=Idle.NO_CONTEXT)
        rows = self._rows_of(self._position, min(budget, self.most_tokens))
        drafted = self._block.draft(self._carried, history[-1], rows)
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
