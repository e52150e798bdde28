"""Reading numbers out of the bytes of blocks `[N, bytes]`, which are little-endian."""

import torch
from torch import Tensor


def read_as(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """`[N, B]` bytes as `[N, B / size]` numbers, in a copy, since blocks align to nothing."""
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)


def half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of each block, as float32 `[N, 1]`."""
    return read_as(blocks[:, offset : offset + 2], torch.float16).float()


def bit_fields(packed: Tensor, *, bits: int, run: int) -> Tensor:
    """Split bytes `[N, B]` into fields of 1, 2 or 4 bits: uint8 `[N, B * 8 / bits]`.

    Runs of `run` bytes are split one after the other. A run gives the lowest field of each of its
    bytes first, then the next higher one of each.
    """
    word = torch.int64 if run % 8 == 0 else torch.uint8  # eight bytes at once where runs allow it
    shifts = torch.arange(0, 8, bits, dtype=word, device=packed.device)[:, None]
    runs = packed.shape[1] // run
    words = read_as(packed, word).view(len(packed), runs, 1, run // word.itemsize)
    fields = words >> shifts  # [N, runs, 8 / bits, words of a run]
    fields &= int.from_bytes(bytes([(1 << bits) - 1] * word.itemsize))
    return fields.flatten(1).view(torch.uint8)


def scaled(q: Tensor, scales: Tensor) -> Tensor:
    """Multiply float32 `[N, C]` in place by `[N, S]`, each scale with C / S neighbours."""
    _in_parts(q, scales.shape[1]).mul_(scales[:, :, None])
    return q


def lowered(values: Tensor, minima: Tensor) -> Tensor:
    """Subtract `[N, S]` in place from float32 `[N, C]`, each minimum from C / S neighbours."""
    _in_parts(values, minima.shape[1]).sub_(minima[:, :, None])
    return values


def _in_parts(values: Tensor, parts: int) -> Tensor:
    return values.view(len(values), parts, values.shape[1] // parts)
