"""Grids and arguments of the kernels."""

import torch
import triton

from ragflash_kernels.sample.kernel import largest_kernel, largest_of_chunks_kernel

_CHUNK = 2048  # a vocabulary of 248,320 gives 122 programs a row


def largest_triton(
    logits: torch.Tensor, num_valid_columns: int, *, eager: bool = False
) -> torch.Tensor:
    """Return the place of each row's largest; arguments as in `largest`."""
    rows = logits.shape[0]
    chunks = triton.cdiv(num_valid_columns, _CHUNK)
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty((rows,), dtype=torch.int32, device=logits.device)
    largest_of_chunks_kernel[rows, chunks](
        logits, tops, places, logits.stride(0), num_valid_columns, chunks, CHUNK=_CHUNK,
        EAGER=eager, num_warps=4, launch_pdl=eager,
    )  # fmt: skip
    largest_kernel[(rows,)](
        tops, places, out, chunks, CHUNKS=triton.next_power_of_2(chunks), EAGER=eager,
        num_warps=1, launch_pdl=eager,
    )  # fmt: skip
    return out
