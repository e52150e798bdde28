"""Bytes of a file on their way to a card."""

import torch

_CHUNK_BYTES = 64 << 20


class Uploader:
    """Copies through two pinned buffers in turn, so that reading and sending overlap.

    Args:
        device: Where to; for a CPU nothing is copied.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._ring: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        if self._device.type == "cuda":
            for _ in range(2):
                staging = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
                self._ring.append((staging, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def __call__(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return bytes of any shape on the device."""
        if not self._ring:
            return blocks
        out = torch.empty(blocks.shape, dtype=blocks.dtype, device=self._device)
        source, target = blocks.reshape(-1), out.view(-1)
        for turn, first in enumerate(range(0, len(source), _CHUNK_BYTES)):
            part = source[first : first + _CHUNK_BYTES]
            staging, sent = self._ring[turn % len(self._ring)]
            sent.synchronize()  # what this buffer held before
            staging[: len(part)].copy_(part)
            target[first : first + len(part)].copy_(staging[: len(part)], non_blocking=True)
            sent.record()
        return out
