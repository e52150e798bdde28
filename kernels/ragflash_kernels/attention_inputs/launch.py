"""Grid and arguments of the kernel."""

import torch
from torch import Tensor

from ragflash_kernels.attention_inputs.kernel import attention_inputs_kernel
from ragflash_kernels.columns import Columns


def attention_inputs_triton(
    products: tuple[Columns, Columns, Columns],
    head_dim: int,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    angles: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    *,
    eager: bool = False,
) -> Tensor:
    """Normalise, rotate and write; arguments as in `attention_inputs`, in pairs and threes."""
    q, k, v = (columns.partials[:, :, columns.start :] for columns in products)
    keys, values = pages
    rows, q_heads, kv_heads = q.shape[1], products[0].width // head_dim, keys.shape[1]
    out = torch.empty((rows, q_heads, head_dim), dtype=torch.float16, device=q.device)
    q_norm, k_norm = (angles[0] if norm is None else norm for norm in norms)
    attention_inputs_kernel[rows, q_heads + 2 * kv_heads](
        q, k, v, q_norm, k_norm, *angles, *places, keys, values, out, q.stride(0), k.stride(0),
        v.stride(0), q.stride(1), k.stride(1), v.stride(1), keys.stride(0), eps, q_heads,
        kv_heads, PAGE=keys.shape[2], DIM=head_dim, HALF=angles[0].shape[1], Q_PARTS=len(q),
        K_PARTS=len(k), V_PARTS=len(v), Q_NORM=norms[0] is not None, K_NORM=norms[1] is not None,
        EAGER=eager, num_warps=1 if head_dim <= 64 else 2, launch_pdl=eager,
    )  # fmt: skip
    return out
