"""The dynamic convolution of DFlash 2: each row adds up itself and the rows before it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ragflash.models.linear import Linear


@dataclass(frozen=True, slots=True)
class DynamicConv:
    """A convolution over the rows of a block, around one part of a layer.

    Row `t` becomes `Σ_tap (base[tap] + dynamic_t[tap, group]) ⊙ x_{t − tap}`, with nothing before
    the block's first row. It is applied twice, to what goes into the part and to what comes out of
    it (`side` 0 and 1), with weights of their own that are computed once, from what goes in.

    Attributes:
        base: `[2, taps, H]` float32, by side.
        projection: Gives the dynamic part, `[2 · taps · H / group_size]`, of a row.
        group_size: Neighbouring channels that share it.
    """

    base: torch.Tensor
    projection: Linear
    group_size: int

    def __call__(
        self, h: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return what a part of the layer makes of rows `[N, H]`, convolved before and after."""
        num_taps, width = self.base.shape[1:]
        dynamic = self.projection(h).view(len(h), 2, num_taps, width // self.group_size)
        weights = dynamic.float().repeat_interleave(self.group_size, dim=-1) + self.base
        return _convolve(part(_convolve(h, weights[:, 0])), weights[:, 1])


def _convolve(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Apply weights `[N, taps, H]` to `[N, H]`, in float32: sums may exceed what float16 holds."""
    rows = x.float()
    out = rows * weights[:, 0]
    for tap in range(1, min(weights.shape[1], len(x))):
        out[tap:].addcmul_(rows[:-tap], weights[tap:, tap])
    return out.to(x.dtype)
