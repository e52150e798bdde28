"""Keys and values in fewer bits: rotate, quantise and pack pages; unpack and rotate back."""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec.formats import (
    MAX_GROUP,
    ROTATION_VERSION,
    KvFormat,
    PageLayout,
    cache_bytes,
    page_layout,
    value_tiles,
)
from ragflash_kernels.kv_codec.reference import (
    bounded,
    decode_reference,
    encode_reference,
    rotate_reference,
)

__all__ = [
    "ROTATION_VERSION",
    "KvFormat",
    "PageLayout",
    "cache_bytes",
    "check_finite",
    "decode_pages",
    "encode_pages",
    "page_layout",
    "rotate",
]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def encode_pages(
    x: torch.Tensor,
    kv_format: KvFormat,
    *,
    values: bool = False,
    offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Encode whole pages; what a token becomes depends on that token alone.

    Finite values never decode to others: values and scales end at what float16 holds. A value that
    is not finite makes its group NaN; refusing it is the caller's part, see `check_finite`.

    Args:
        x: Floats `[P, Hkv, T, D]`, the last dimension contiguous; D is 32, 64 or a multiple of
            128. The Triton kernel wants D to be a power of two.
        kv_format: Not `F16` for the Triton kernel.
        values: They are values, not keys. `TQ3_0` lays these out differently, see `formats.py`, and
            wants a multiple of 32 of them a page.
        offsets: float32 `[Hkv, D]`, subtracted first: a constant of the model, for keys whose
            channels have large means, which a softmax does not see.
        out: Written and returned when given.
        backend: None picks by the device of `x`.

    Returns:
        uint8 `[P, Hkv, page_layout(…).size]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check_head_dim(x)
    if x.dim() != 4 or x.dtype not in _FLOATS or x.stride(3) != 1:
        raise KernelInputError(f"x is {x.dtype} {tuple(x.shape)}, not floats [P, Hkv, T, D]")
    pages, heads, page_tokens, head_dim = x.shape
    values = _in_tiles(kv_format, page_tokens, values=values)
    if offsets is not None and (
        offsets.shape != (heads, head_dim) or offsets.dtype != torch.float32
    ):
        raise KernelInputError(
            f"offsets are {offsets.dtype} {tuple(offsets.shape)}, not float32 {(heads, head_dim)}"
        )
    shape = (pages, heads, page_layout(kv_format, page_tokens, head_dim).size)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=x.device)
    elif out.shape != shape or out.dtype != torch.uint8 or not out.is_contiguous():
        raise KernelInputError(f"out is {out.dtype} {tuple(out.shape)}, not uint8 {shape}")
    if (backend or pick_backend(x.device)) is not Backend.REFERENCE:
        if kv_format is KvFormat.F16 or head_dim & (head_dim - 1):
            raise KernelInputError(f"no kernel encodes {kv_format} of {head_dim} values a head")
        from ragflash_kernels.kv_codec.launch import encode_triton  # noqa: PLC0415 - lazy

        encode_triton(x, kv_format, offsets, out, values=values)
        return out
    wide = bounded(x if offsets is None else x.float() - offsets[:, None])
    if kv_format.rotated:
        wide = rotate_reference(wide, inverse=False)
    encode_reference(wide.flatten(0, 1), kv_format, out.view(-1, shape[2]), values=values)
    return out


def decode_pages(
    pages: torch.Tensor,
    kv_format: KvFormat,
    *,
    page_tokens: int,
    head_dim: int,
    values: bool = False,
    rotated: bool = False,
) -> torch.Tensor:
    """Decode what `encode_pages` returned, offsets left out: float32 `[P, Hkv, T, D]`.

    Args:
        pages: As returned there.
        kv_format: As given there.
        page_tokens: T.
        head_dim: D.
        values: As given there.
        rotated: Leave values rotated, as attention reads them.

    Raises:
        KernelInputError: `pages` is not of that format.
    """
    size = page_layout(kv_format, page_tokens, head_dim).size
    if pages.dtype != torch.uint8 or pages.dim() != 3 or pages.shape[2] != size:
        raise KernelInputError(
            f"pages are {pages.dtype} {tuple(pages.shape)}, not uint8 [P, Hkv, {size}]"
        )
    values = _in_tiles(kv_format, page_tokens, values=values)
    decoded = decode_reference(pages.flatten(0, 1), kv_format, page_tokens, head_dim, values=values)
    if kv_format.rotated and not rotated:
        decoded = rotate_reference(decoded, inverse=True)
    return decoded.view(*pages.shape[:2], page_tokens, head_dim)


def rotate(
    x: torch.Tensor, *, inverse: bool = False, backend: Backend | None = None
) -> torch.Tensor:
    """Rotate groups of the last dimension as `encode_pages` does, or back.

    Queries are rotated to meet rotated keys, sums of rotated values are rotated back.

    Args:
        x: Floats `[…, D]`, contiguous; D as in `encode_pages`.
        inverse: Rotate back.
        backend: None picks by the device of `x`.

    Returns:
        float32 of the shape of `x`.

    Raises:
        KernelInputError: D does not fit.
    """
    _check_head_dim(x)
    if (backend or pick_backend(x.device)) is Backend.REFERENCE:
        return rotate_reference(x, inverse=inverse)
    from ragflash_kernels.kv_codec.launch import rotate_triton  # noqa: PLC0415 - lazy

    return rotate_triton(x.contiguous(), inverse=inverse)


def check_finite(x: torch.Tensor, *, label: str) -> None:
    """Refuse values that are not finite; waits for the device.

    Args:
        x: `[P, Hkv, T, D]`.
        label: What they are, for the message: "layer 3, keys".

    Raises:
        KernelInputError: Names the label and the first such place.
    """
    bad = (~x.isfinite()).nonzero()
    if len(bad):
        page, head, token, channel = bad[0].tolist()
        raise KernelInputError(
            f"{label}: page {page}, head {head}, token {token}, channel {channel} is not finite"
        )


def _in_tiles(kv_format: KvFormat, page_tokens: int, *, values: bool) -> bool:
    """Return whether a page is laid out as values in tiles are."""
    if not values or kv_format is not KvFormat.TQ3_0:
        return False
    if not value_tiles(page_tokens):
        raise KernelInputError(f"{page_tokens} values a page; {kv_format} wants a multiple of 32")
    return True


def _check_head_dim(x: torch.Tensor) -> None:
    head_dim = x.shape[-1] if x.dim() else 0
    if head_dim not in (32, 64) and (head_dim == 0 or head_dim % MAX_GROUP):
        raise KernelInputError(f"heads of {head_dim} values; they must have 32, 64 or 128 n")
