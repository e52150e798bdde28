"""From the products of Q, K and V to what attention reads: norms, rotation, pages."""

import torch

from ragflash_kernels.attention_inputs.reference import attention_inputs_reference
from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError

__all__ = ["attention_inputs"]


def attention_inputs(
    q: Columns,
    k: Columns,
    v: Columns,
    *,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_pages: torch.Tensor,
    row_places: torch.Tensor,
    backend: Backend | None = None,
    eager: bool = False,
) -> torch.Tensor:
    """Normalise and rotate the heads of Q and K, and write K and V to their pages.

    The arithmetic is float32, rounded once; what float16 cannot hold becomes its largest value.

    Args:
        q: N rows of Hq heads of D = `head_dim`.
        k: N rows of Hkv heads.
        v: As `k`.
        head_dim: Values of a head; the Triton kernel wants a power of two.
        q_norm: Weight of the RMS norm of each query head, float32 `[D]`; None for no norm.
        k_norm: Likewise of each key head.
        eps: Added to mean squares.
        cos: Cosines of the rows' angles, float32 `[N, F]`, `2 F ≤ D`, contiguous: dimension j
            pairs with `j + F`, dimensions from `2 F` on pass (`rope`).
        sin: Their sines.
        keys: float16 `[P, Hkv, T, D]`; a page is contiguous, pages may lie apart.
        values: As `keys`, with the same strides.
        row_pages: int32 `[N]`: the page that a row's K and V are written to; nothing is for -1.
        row_places: int32 `[N]`: the place in it, below T.
        backend: None picks by the device. There is one kernel; Gluon takes it too.
        eager: Programmatic dependent launch (sm_90).

    Returns:
        float16 `[N, Hq, D]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check_columns(q, k, v, head_dim, keys)
    _check_pages(keys, values, head_dim)
    norms, angles, places = (q_norm, k_norm), (cos, sin), (row_pages, row_places)
    _check_rows(q.partials.shape[1], head_dim, norms, angles, places)
    pages = (keys, values)
    if (backend or pick_backend(keys.device)) is Backend.REFERENCE:
        return attention_inputs_reference((q, k, v), head_dim, norms, eps, angles, pages, places)
    if head_dim & (head_dim - 1):
        raise KernelInputError(f"no kernel for heads of {head_dim} values")
    from ragflash_kernels.attention_inputs.launch import attention_inputs_triton  # noqa: PLC0415

    return attention_inputs_triton(
        (q, k, v), head_dim, norms, eps, angles, pages, places, eager=eager
    )


def _check_columns(q: Columns, k: Columns, v: Columns, head_dim: int, keys: torch.Tensor) -> None:
    if k.width != v.width or q.width % head_dim or k.width != keys.shape[1] * head_dim:
        raise KernelInputError(
            f"{q.width}, {k.width} and {v.width} columns are not heads of {head_dim} for pages "
            f"{tuple(keys.shape)}"
        )
    if not q.partials.shape[1] == k.partials.shape[1] == v.partials.shape[1]:
        raise KernelInputError("q, k and v have different rows")


def _check_rows(
    num_rows: int,
    head_dim: int,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    angles: tuple[torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
) -> None:
    cos, sin = angles
    if cos.dim() != 2 or cos.shape != sin.shape or len(cos) != num_rows:
        raise KernelInputError(f"angles {tuple(cos.shape)}, {tuple(sin.shape)} of {num_rows} rows")
    if 2 * cos.shape[1] > head_dim or not (cos.is_contiguous() and sin.is_contiguous()):
        raise KernelInputError(f"angles {tuple(cos.shape)} do not fit heads of {head_dim}")
    for name, norm in zip(("q_norm", "k_norm"), norms, strict=True):
        if norm is not None and (norm.shape != (head_dim,) or norm.dtype != torch.float32):
            raise KernelInputError(f"{name} is {norm.dtype} {tuple(norm.shape)}")
    for name, table in zip(("row_pages", "row_places"), places, strict=True):
        if table.shape != (num_rows,) or table.dtype != torch.int32:
            raise KernelInputError(f"{name} is {table.dtype} {tuple(table.shape)}")


def _check_pages(keys: torch.Tensor, values: torch.Tensor, head_dim: int) -> None:
    for name, pages in (("keys", keys), ("values", values)):
        if (
            pages.dim() != 4
            or pages.dtype != torch.float16
            or pages.shape[3] != head_dim
            or not pages[0].is_contiguous()
        ):
            raise KernelInputError(
                f"{name} are {pages.dtype} {tuple(pages.shape)}, not float16 [P, Hkv, T, "
                f"{head_dim}] with contiguous pages"
            )
    if keys.shape != values.shape or keys.stride() != values.stride():
        raise KernelInputError("keys and values are laid out differently")
