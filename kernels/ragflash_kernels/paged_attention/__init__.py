"""Attention of the rows of several sequences over keys and values in pages.

`paged_attention` is causal over pages of one form, by plain torch; `attend_parts` is what a card
runs: exact and packed pages, what rows see in tables, gate and grid of the next product included.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat
from ragflash_kernels.paged_attention.parts import KvPart, attend_parts_reference
from ragflash_kernels.paged_attention.reference import paged_attention_reference
from ragflash_kernels.paged_attention.visibility import Visibility
from ragflash_kernels.parents import check_parents
from ragflash_kernels.qmatmul.activations import ActivationBuffers

__all__ = ["KvPart", "QueryRows", "Visibility", "attend_parts", "paged_attention"]


class QueryRows(Protocol):
    """One sequence's share of the query rows.

    Row `r` is token `committed + r` of `pages`. It sees the tokens before all rows, and itself and
    the rows before it on its path; of a window, those of the newest positions.
    """

    @property
    def num_rows(self) -> int:
        """Query rows, at least 1."""

    @property
    def committed(self) -> int:
        """Tokens before the first row."""

    @property
    def pages(self) -> tuple[int, ...]:
        """Page numbers in order; they hold `committed + num_rows` tokens or more."""

    @property
    def parents(self) -> tuple[int, ...] | None:
        """For each row the row before it, a smaller number, -1 for none; `None` is a chain.

        A row's position is `committed` and the number of rows before it on its path.
        """


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    sequences: Sequence[QueryRows],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend, head by head; `Hq / Hkv` consecutive query heads share a key head.

    Places of a page that no row sees are not read: they may hold anything, NaN included.

    Args:
        q: `[N, Hq, D]`, the rows of `sequences` one after the other.
        keys: `[P, Hkv, page_tokens, D]`; tokens of a head are contiguous.
        values: As `keys`.
        sequences: Who the rows belong to.
        scale: Of the scores before the softmax, usually `D ** -0.5`.
        window: Newest tokens that a row sees, its own included; `None` for all.

    Returns:
        `[N, Hq, D]` of the dtype of `q`; the softmax is float32.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(q, keys, values, sequences)
    if window is not None and window < 1:
        raise KernelInputError(f"a window of {window} tokens")
    return paged_attention_reference(q, keys, values, sequences, scale, window)


def attend_parts(
    q: torch.Tensor,
    exact: KvPart,
    packed: KvPart | None,
    *,
    scale: float,
    gate: Columns | None,
    quantized: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: Backend | None = None,
    eager: bool = False,
) -> ActivationBuffers | torch.Tensor:
    """Attend to both parts of a cache, multiply by the gate's sigmoid, and round once.

    A row's result depends neither on other rows nor on how many there are. A row that sees nothing
    gives 0.

    Args:
        q: Floats `[N, Hq, D]`, contiguous; D is 64, 128 or 256.
        exact: float16 pages of T tokens.
        packed: Packed pages of as many tokens, of which rows see those before the end only; None
            when there are none. Queries are rotated for it here, and its sums back.
        scale: Of scores before the softmax.
        gate: `[N, Hq · D]`; None for no gate.
        quantized: Return the int8 grid; `out_dtype` is without effect then.
        out_dtype: A float type.
        backend: None picks by the device.
        eager: Programmatic dependent launch (sm_90).

    Returns:
        `[N, Hq · D]`. Rows that belong to no sequence hold anything.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    rows, heads, head_dim = q.shape
    if exact.formats != (KvFormat.F16, KvFormat.F16) or exact.keys.dim() != 4:
        raise KernelInputError(f"the exact part is in {exact.formats}")
    if gate is not None and (gate.partials.shape[1], gate.width) != (rows, heads * head_dim):
        raise KernelInputError(f"a gate of {gate.width} columns for {heads} heads of {head_dim}")
    backend = backend or pick_backend(q.device)
    if backend is Backend.REFERENCE:
        parts = [exact] if packed is None else [exact, packed]
        mixed = attend_parts_reference(q, parts, scale, exact.keys.shape[2]).flatten(1)
        if gate is not None:
            mixed = mixed * gate.sum().sigmoid()
        return ActivationBuffers.from_rows(mixed) if quantized else mixed.to(out_dtype)
    from ragflash_kernels.paged_attention.launch import attend_parts_on_card  # noqa: PLC0415 - lazy

    out: ActivationBuffers | torch.Tensor
    if quantized:
        out = ActivationBuffers.allocate(rows, heads * head_dim, q.device)
    else:
        out = torch.empty((rows, heads * head_dim), dtype=out_dtype, device=q.device)
    attend_parts_on_card(
        q, exact, packed, scale=scale, gate=gate, out=out, backend=backend, eager=eager
    )
    return out


def _check(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequences: Sequence[QueryRows]
) -> None:
    if q.dim() != 3 or keys.dim() != 4 or keys.shape != values.shape:
        raise KernelInputError(
            f"q {tuple(q.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} are "
            "not [N, Hq, D] and twice [P, Hkv, page_tokens, D]"
        )
    if not q.dtype == keys.dtype == values.dtype:
        raise KernelInputError(f"q, keys, values are {q.dtype}, {keys.dtype}, {values.dtype}")
    num_pages, num_kv_heads, page_tokens, head_dim = keys.shape
    if q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise KernelInputError(
            f"{q.shape[1]} query heads of {q.shape[2]} do not fit {num_kv_heads} of {head_dim}"
        )
    if sum(rows.num_rows for rows in sequences) != q.shape[0]:
        raise KernelInputError(f"the sequences do not have {q.shape[0]} rows together")
    for rows in sequences:
        check_parents(rows.parents, rows.num_rows)
        if rows.num_rows < 1 or rows.committed < 0:
            raise KernelInputError(f"{rows.num_rows} rows after {rows.committed} tokens")
        if rows.committed + rows.num_rows > len(rows.pages) * page_tokens:
            raise KernelInputError(
                f"{rows.committed} + {rows.num_rows} tokens do not fit {len(rows.pages)} pages"
            )
        if min(rows.pages) < 0 or max(rows.pages) >= num_pages:
            raise KernelInputError(f"page numbers {rows.pages} are not all below {num_pages}")
