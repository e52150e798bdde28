"""Random rows of GGML blocks with scales that make values of ordinary size."""

import torch

from ragflash_kernels.quant_layout import BLOCK_FORMATS

SCALE_OFFSETS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def random_blocks(
    name: str, rows: int, columns: int, *, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """uint8 `[rows, row_bytes]` of one of `SCALE_OFFSETS`."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = BLOCK_FORMATS[name]
    shape = (rows, columns // sizes.elements_per_block)
    blocks = torch.randint(
        0, 256, (*shape, sizes.bytes_per_block),
        dtype=torch.uint8, device=device, generator=generator,
    )  # fmt: skip
    for offset in SCALE_OFFSETS[name]:
        scale = torch.rand(*shape, 1, device=device, generator=generator) * 0.01 - 0.003
        blocks[..., offset : offset + 2] = scale.half().view(torch.uint8)
    return blocks.view(rows, -1)
