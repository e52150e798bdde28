"""Memory whose surroundings and former contents are poison."""

import math

import torch

RED_ZONE_BYTES = 512
POISON = 0xFF  # a NaN in every float type, -1 in every integer


class GuardedMemory:
    """Hands out tensors between red zones, filled with poison, and checks the zones.

    What a kernel fails to write is NaN afterwards, what it reads beside a tensor makes NaN, what
    it writes there is found by `check`.
    """

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def empty(self, *size, dtype=torch.float32, device="cpu") -> torch.Tensor:
        """Stand in for `torch.empty`."""
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        num_bytes = math.prod(shape) * dtype.itemsize
        padded = -(-num_bytes // 16) * 16
        buffer = torch.full(
            (padded + 2 * RED_ZONE_BYTES,), POISON, dtype=torch.uint8, device=device
        )
        self.buffers.append(buffer)
        inside = buffer[RED_ZONE_BYTES : RED_ZONE_BYTES + num_bytes]
        return inside.view(dtype).view(tuple(shape))

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` between red zones."""
        return self.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def check(self) -> None:
        """Fail if a red zone was written to."""
        assert self.buffers
        for buffer in self.buffers:
            assert bool((buffer[:RED_ZONE_BYTES] == POISON).all())
            assert bool((buffer[-RED_ZONE_BYTES:] == POISON).all())
