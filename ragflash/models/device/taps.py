"""Rows of the residual stream that drafters read, kept where captured launches write them."""

from collections.abc import Sequence

import torch


class StreamTaps:
    """Keeps what stands in the stream behind some layers, and behind the last.

    Launches write the rows of one group to a fixed place; a forward of several groups copies them
    from there before the next one is launched.

    Args:
        layers: Whose rows are kept beside those of the last, ascending.
        hidden_size: Values of a row.
        max_rows: Of a group.
        like: Where rows are kept and in what; bfloat16 on a card, as what reads them is coarser.

    Attributes:
        layers: As given.
    """

    def __init__(
        self,
        layers: Sequence[int],
        hidden_size: int,
        *,
        max_rows: int,
        like: torch.Tensor,
    ) -> None:
        self.layers = tuple(layers)
        self._hidden_size = hidden_size
        width = hidden_size * (len(self.layers) + 1)
        self._written = like.new_zeros(max_rows, width)
        self._forward = self._written[:0]
        self._is_alone = True

    def keep(self, layer: int, residual: torch.Tensor) -> None:
        """Copy a group's stream `[N, H]` behind a layer, if it is one of `layers`."""
        if layer in self.layers:
            self._keep(self.layers.index(layer), residual)

    def keep_last(self, residual: torch.Tensor) -> None:
        """Copy a group's stream `[N, H]` behind the last layer."""
        self._keep(len(self.layers), residual)

    def begin(self, num_rows: int, *, is_alone: bool) -> None:
        """Begin a forward.

        Args:
            num_rows: Of all its groups.
            is_alone: Whether it has one group; its rows may stay where they are written.
        """
        written = self._written
        shape = num_rows, written.shape[1]
        self._is_alone = is_alone
        self._forward = written[:num_rows] if is_alone else written.new_empty(shape)

    def collect(self, first: int, end: int) -> None:
        """Take over the rows of a group, those from `first` on, before the next is launched."""
        if not self._is_alone:
            self._forward[first:end].copy_(self._written[: end - first])

    def hold(self) -> None:
        """Keep the forward's rows although another step is launched now."""
        self._forward = self._forward.clone()

    @property
    def stream(self) -> torch.Tensor:
        """The forward's rows behind the last layer, `[N, H]`."""
        return self._forward[:, -self._hidden_size :]

    @property
    def taps(self) -> torch.Tensor:
        """The forward's rows behind `layers`, side by side, `[N, taps · H]`."""
        return self._forward[:, : -self._hidden_size]

    def _keep(self, place: int, residual: torch.Tensor) -> None:
        start = place * self._hidden_size
        self._written[: len(residual), start : start + self._hidden_size].copy_(residual)
