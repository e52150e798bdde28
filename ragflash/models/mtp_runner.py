"""Runs a block of multi-token prediction over the pages of its model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ragflash.kvcache.allocator import pages_for
from ragflash.kvcache.pages import KVPages
from ragflash.models.contract import ForwardBatch, SequenceRows
from ragflash.models.decoder import Decoder
from ragflash.models.mtp import MtpHead


class MtpRunner(Protocol):
    """The block where it runs; for the thread that runs the model.

    It reads rows of the model's stream, each of the token before the one that it goes with, and
    keeps keys and values at that one's position. Zeros stand before the first token.
    """

    @property
    def nothing(self) -> torch.Tensor:
        """Zeros `[1, H]`, like rows of the stream."""

    def absorb(self, stream: torch.Tensor, token_ids: Sequence[int], rows: SequenceRows) -> None:
        """Write keys and values of tokens.

        Args:
            stream: `[N, H]`, behind the model's last layer (`Tapped.stream`).
            token_ids: N tokens.
            rows: Of the tokens.
        """

    def draft(self, stream: torch.Tensor, token_id: int, rows: SequenceRows) -> list[int]:
        """Return the likeliest token after one, the likeliest after that, and so on.

        Args:
            stream: `[1, H]`, of the token before.
            token_id: The one.
            rows: As many as tokens are wanted, at most `MAX_DEPTH`; keys and values are written.
        """


class HostMtp:
    """Runs the block as layers, on the processor.

    Args:
        model: Whose block it is.
        head: The block.
        pages: Of the model.
    """

    def __init__(self, model: Decoder, head: MtpHead, pages: KVPages) -> None:
        self._model = model
        self._head = head
        self._pages = pages

    @property
    def nothing(self) -> torch.Tensor:
        """See `MtpRunner`."""
        return torch.zeros_like(self._head.hidden_norm.weight, dtype=self._model.compute_dtype)[
            None
        ]

    def absorb(self, stream: torch.Tensor, token_ids: Sequence[int], rows: SequenceRows) -> None:
        """See `MtpRunner`."""
        self._further(self._read(stream), token_ids, rows)

    def draft(self, stream: torch.Tensor, token_id: int, rows: SequenceRows) -> list[int]:
        """See `MtpRunner`."""
        drafted: list[int] = []
        hidden = self._read(stream)
        for position in range(rows.committed, rows.committed + rows.num_rows):
            num_pages = pages_for(position + 1) - len(rows.packed_pages)
            row = replace(rows, num_rows=1, committed=position, pages=rows.pages[:num_pages])
            hidden = self._further(hidden, [token_id], row)
            token_id = int(self._head.logits(hidden)[0].argmax())
            drafted.append(token_id)
        return drafted

    def _read(self, stream: torch.Tensor) -> torch.Tensor:
        return self._model.parts.norm(stream) if self._head.reads_normed else stream

    def _further(
        self, hidden: torch.Tensor, token_ids: Sequence[int], rows: SequenceRows
    ) -> torch.Tensor:
        positions = torch.arange(rows.committed, rows.committed + rows.num_rows)
        batch = ForwardBatch(torch.tensor(token_ids), positions, (rows,))
        return self._head.hidden(hidden, self._model.step(batch, self._pages))
