"""Scratch memory that all layers of a forward share."""

import torch
from torch import Tensor

from ragflash_kernels.errors import KernelInputError

SEGMENT_TOKENS = 16384


class PrefillWorkspace:
    """Buffers for unpacked history, queries and sums; what they hold does not outlive a call."""

    def __init__(
        self,
        *,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        page_tokens: int = 256,
        segment_tokens: int = SEGMENT_TOKENS,
    ) -> None:
        """Allocate for the largest chunk and the largest layer.

        Args:
            max_rows: Rows of a chunk.
            num_heads: Query heads.
            num_kv_heads: Key heads.
            head_dim: Values of a head.
            device: Where.
            page_tokens: Tokens of a page.
            segment_tokens: Tokens of history that are unpacked at a time, whole pages.
        """
        if segment_tokens < page_tokens or segment_tokens % page_tokens:
            raise KernelInputError(f"segments of {segment_tokens} tokens")
        # A chunk may begin anywhere in its page and is padded to whole pages.
        rows = (max_rows + 2 * page_tokens - 2) // page_tokens * page_tokens
        self.segment_tokens = segment_tokens
        tokens = max(segment_tokens, rows)
        kv_values, q_values = tokens * num_kv_heads * head_dim, rows * num_heads * head_dim

        def half(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.float16, device=device)

        self._keys, self._values = half(kv_values), half(kv_values)
        self._queries, self._rotated = half(q_values), half(q_values)
        self._total = torch.empty(q_values, device=device)
        self._lse = torch.empty(rows * num_heads, device=device)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All memory of it."""
        return self._keys, self._values, self._queries, self._rotated, self._total, self._lse

    @property
    def nbytes(self) -> int:
        """Size of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def keys(self, num_kv_heads: int, tokens: int, head_dim: int) -> Tensor:
        """Return float16 `[Hkv, tokens, D]`."""
        return _shaped(self._keys, num_kv_heads, tokens, head_dim)

    def values(self, num_kv_heads: int, tokens: int, head_dim: int) -> Tensor:
        """Return float16 `[Hkv, tokens, D]`."""
        return _shaped(self._values, num_kv_heads, tokens, head_dim)

    def queries(self, rows: int, num_heads: int, head_dim: int) -> Tensor:
        """Return float16 `[rows, Hq, D]`."""
        return _shaped(self._queries, rows, num_heads, head_dim)

    def rotated(self, rows: int, num_heads: int, head_dim: int) -> Tensor:
        """Return float16 `[rows, Hq, D]`, another buffer."""
        return _shaped(self._rotated, rows, num_heads, head_dim)

    def total(self, rows: int, num_heads: int, head_dim: int) -> Tensor:
        """Return float32 `[rows, Hq, D]`."""
        return _shaped(self._total, rows, num_heads, head_dim)

    def lse(self, num_heads: int, rows: int) -> Tensor:
        """Return float32 `[Hq, rows]`."""
        return _shaped(self._lse, num_heads, rows)


def _shaped(buffer: Tensor, *shape: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    if count > buffer.numel():
        raise KernelInputError(f"the workspace is too small for {shape}")
    return buffer[:count].view(shape)
