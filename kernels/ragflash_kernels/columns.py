"""Columns of a matrix product that the next kernel reads while its parts are not added yet."""

from dataclasses import dataclass

import torch

from ragflash_kernels.errors import KernelInputError


@dataclass(frozen=True, slots=True)
class Columns:
    """Some neighbouring columns of a product.

    Attributes:
        partials: `[P, N, C]`, the last dimension contiguous; the product is their sum, taken in
            order. Float32, or another float type when P is 1.
        start: First column.
        width: Columns.
    """

    partials: torch.Tensor
    start: int
    width: int

    @classmethod
    def whole(cls, partials: torch.Tensor) -> "Columns":
        """All columns of a product `[P, N, C]`."""
        return cls(partials, 0, partials.shape[2])

    def split(self, *widths: int) -> "tuple[Columns, ...]":
        """Cut into neighbours; raises `KernelInputError` unless `widths` add up to all columns."""
        if sum(widths) != self.width:
            raise KernelInputError(f"columns of {widths} are not {self.width} together")
        starts = [self.start + sum(widths[:at]) for at in range(len(widths))]
        return tuple(Columns(self.partials, *at) for at in zip(starts, widths, strict=True))

    def sum(self) -> torch.Tensor:
        """Return the values `[N, width]`, float32."""
        parts = self.partials[:, :, self.start : self.start + self.width].float().unbind()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
