"""What a drafter reads of its target: the residual stream behind some of its layers."""

from collections.abc import Sequence

import torch

from ragflash.models.decoder import Decoder
from ragflash.models.layers import Step


@torch.no_grad()
def hidden_and_taps(
    decoder: Decoder, step: Step, tap_layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all blocks of a target; rows are written as `Decoder.forward` does.

    Args:
        decoder: The target.
        step: Its rows.
        tap_layers: Ascending, see `DFlashConfig`.

    Returns:
        All rows after the last norm `[N, H]`, and their taps side by side `[N, taps · H]`.
    """
    x, step = decoder.embed(step)
    taps = []
    for layer, block in enumerate(decoder.parts.blocks):
        x = block(x, step)
        if layer in tap_layers:
            taps.append(x)
    return decoder.parts.norm(x), torch.cat(taps, dim=-1)
