"""A decoder some of whose layers keep a state of fixed size beside the pages of the others."""

from collections.abc import Sequence

import torch

from ragflash.kvcache.pages import KVLayout, KVPages
from ragflash.models.contract import ForwardBatch
from ragflash.models.decoder import Decoder, DecoderParts
from ragflash.models.layers import Step
from ragflash.models.recurrent import SlotStates


class HybridDecoder(Decoder):
    """Adds the slots' states to `Decoder`."""

    def __init__(
        self,
        parts: DecoderParts,
        *,
        vocab_size: int,
        context_tokens: int,
        kv_layout: KVLayout,
        states: SlotStates,
    ) -> None:
        super().__init__(
            parts, vocab_size=vocab_size, context_tokens=context_tokens, kv_layout=kv_layout
        )
        self._states = states

    @property
    def is_recurrent(self) -> bool:
        """See `Model`."""
        return True

    def step(self, batch: ForwardBatch, pages: KVPages) -> Step:
        """See `Decoder`."""
        step = super().step(batch, pages)
        return Step(batch, pages, step.angles, self._states)

    @torch.no_grad()
    def commit(self, slot: int, path: Sequence[int]) -> None:
        """See `Model`."""
        self._states.commit(slot, path)

    def reset(self, slot: int) -> None:
        """See `Model`."""
        self._states.reset(slot)

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """See `Model`."""
        return self._states.snapshot(slot)

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        """See `Model`."""
        self._states.restore(slot, state)
