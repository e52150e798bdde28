"""Pieces of attention, grids and arguments of the kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import e, log2
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat, rotate
from ragflash_kernels.prefill_attention.backends import PrefillBackend, attend_torch
from ragflash_kernels.prefill_attention.kernel import attend_kernel, merge_kernel, pad_kernel
from ragflash_kernels.prefill_attention.unpack.launch import unpack_pages
from ragflash_kernels.prefill_attention.workspace import PrefillWorkspace

if TYPE_CHECKING:
    from ragflash_kernels.prefill_attention import PackedHistory

_NO_WINDOW = 2**30
_MERGED_PIECES = 4  # at a time, by the kernel
_FULL_ROWS = 2**15  # rows times heads that fill a card: two tiles of 128 on most processors of it


@dataclass(frozen=True)
class _Store:
    """Keys and values of one of a sequence's two lists."""

    keys: Tensor
    values: Tensor
    pages: Tensor
    key_format: KvFormat
    value_format: KvFormat


@dataclass(frozen=True)
class _Piece:
    """Neighbouring pages of a list that are attended to in one go.

    Attributes:
        begin: The first page.
        end: One past the last.
        first: Row r sees the tokens up to this one plus r; `None` for all.
        window: The newest tokens that a row sees.
        splits: How many equal parts are attended to apart.
    """

    begin: int
    end: int
    first: int | None = None
    window: int | None = None
    splits: int = 1


def attend_in_pieces(
    q: Tensor,
    exact_keys: Tensor,
    exact_values: Tensor,
    exact_pages: Tensor,
    exact_before: int,
    packed: "PackedHistory | None",
    scale: float,
    window: int | None,
    gate: Columns | None,
    out_dtype: torch.dtype,
    workspace: PrefillWorkspace,
    backend: PrefillBackend,
) -> Tensor:
    """Attend to segments of the lists and merge in their order; see `prefill_attention`.

    Rows are padded at both ends to whole pages of the exact list, so that the last piece is a
    square of as many rows as tokens.
    """
    page_tokens, head_dim = exact_keys.shape[2], q.shape[2]
    _check(q, exact_keys, page_tokens)
    front = exact_before % page_tokens
    own_page = exact_before // page_tokens
    end_page = -(-(exact_before + len(q)) // page_tokens)
    rows = (end_page - own_page) * page_tokens
    queries = workspace.queries(rows, q.shape[1], head_dim)
    _pad(q, front, queries)
    merge = _Merge(q, front, rows, workspace, gate, out_dtype)
    chunk = _Chunk(scale, page_tokens, workspace, backend)
    most = workspace.segment_tokens // page_tokens
    splits = _pick_splits(rows * q.shape[1])
    if packed is not None:
        store = _Store(
            packed.keys, packed.values, packed.pages, packed.key_format, packed.value_format
        )
        turned = queries
        if packed.key_format.rotated:
            turned = workspace.rotated(rows, q.shape[1], head_dim)
            turned.copy_(rotate(queries))
        for piece in _segments(len(packed.pages), most, splits):
            merge.add(*chunk.attend(turned, store, piece, piece.end * page_tokens))
        if packed.value_format.rotated:
            merge.rotate_back()
    store = _Store(exact_keys, exact_values, exact_pages, KvFormat.F16, KvFormat.F16)
    if window is None:
        for piece in _segments(own_page, most, splits):
            merge.add(*chunk.attend(queries, store, piece, piece.end * page_tokens))
        square = _Piece(own_page, end_page, first=0)
    else:
        begin = max(0, exact_before + 1 - window) // page_tokens
        square = _Piece(begin, end_page, (own_page - begin) * page_tokens, window)
    merge.add(*chunk.attend(queries, store, square, exact_before + len(q)))
    return merge.finish()


def _pick_splits(query_rows: int) -> int:
    """Return into how many parts segments are split, so that few query rows fill a card."""
    splits = 1
    while splits < _MERGED_PIECES and splits * query_rows < _FULL_ROWS:
        splits *= 2
    return splits


def _segments(pages: int, most: int, splits: int) -> Iterator[_Piece]:
    """Cut pages into pieces of at most so many; what cannot be split comes last."""
    begin = 0
    while begin < pages:
        size = min(most, pages - begin)
        even = size // splits * splits
        yield _Piece(begin, begin + (even or size), splits=splits if even else 1)
        begin += even or size


@dataclass(frozen=True)
class _Chunk:
    """What all pieces of a chunk share."""

    scale: float
    page_tokens: int
    workspace: PrefillWorkspace
    backend: PrefillBackend

    def attend(
        self, queries: Tensor, store: _Store, piece: _Piece, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Unpack a piece of a list that holds `num_tokens`, and attend to it.

        Returns weighted means `[splits, rows, Hq, D]` and natural logarithms of sums of weights
        `[splits, Hq, rows]`.
        """
        pages = store.pages[piece.begin : piece.end]
        num_tokens -= piece.begin * self.page_tokens
        num_kv_heads, head_dim = store.keys.shape[1], queries.shape[2]
        tokens = len(pages) * self.page_tokens
        keys = self.workspace.keys(num_kv_heads, tokens, head_dim)
        values = self.workspace.values(num_kv_heads, tokens, head_dim)
        for stored, kv_format, out in (
            (store.keys, store.key_format, keys),
            (store.values, store.value_format, values),
        ):
            unpack_pages(
                stored, pages, kv_format, self.page_tokens, out, values=out is values,
                num_tokens=num_tokens,
            )  # fmt: skip
        if self.backend is PrefillBackend.TRITON:
            return attend_triton(
                queries, keys, values, self.scale, first=piece.first, window=piece.window,
                splits=piece.splits, page_tokens=self.page_tokens,
            )  # fmt: skip
        return attend_torch(
            self.backend, queries, keys, values, self.scale, causal=piece.first is not None,
            splits=piece.splits,
        )  # fmt: skip


class _Merge:
    """The total of the pieces so far; a few wait, so that it is written less often."""

    def __init__(
        self,
        q: Tensor,
        front: int,
        rows: int,
        workspace: PrefillWorkspace,
        gate: Columns | None,
        out_dtype: torch.dtype,
    ) -> None:
        self._result = torch.empty(q.shape, dtype=out_dtype, device=q.device)
        self._total = workspace.total(rows, *q.shape[1:])
        self._lse = workspace.lse(q.shape[1], rows)
        self._front = front
        self._gate = gate
        self._is_empty = True
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, means: Tensor, lse: Tensor) -> None:
        """Take the splits of a piece; see `_Chunk.attend`."""
        for part in zip(means, lse, strict=True):
            if len(self._waiting) == _MERGED_PIECES:
                self._launch(last=False)
            self._waiting.append(part)

    def rotate_back(self) -> None:
        """Rotate what there is, at least one piece."""
        self._launch(last=False)
        self._total = rotate(self._total, inverse=True)

    def finish(self) -> Tensor:
        """Return the total; at least one piece was added since it was rotated."""
        self._launch(last=True)
        return self._result

    def _launch(self, *, last: bool) -> None:
        num_rows, num_heads, head_dim = self._result.shape
        count, per_program = num_rows * num_heads, 2048 // head_dim
        parts = [*self._waiting, *[self._waiting[0]] * (_MERGED_PIECES - len(self._waiting))]
        gate = self._gate or Columns.whole(self._total)
        merge_kernel[(triton.cdiv(count, per_program),)](
            self._total, self._lse, *chain(*parts), self._result, gate.partials[0, 0, gate.start :],
            self._front * num_heads, count, len(self._total), num_heads, gate.partials.stride(1),
            gate.partials.stride(0), DIM=head_dim, B=per_program, PARTS=len(self._waiting),
            FIRST=self._is_empty, LAST=last,
            GATE_PARTS=len(gate.partials) if last and self._gate else 0, num_warps=4,
        )  # fmt: skip
        self._waiting.clear()
        self._is_empty = False


@dataclass(frozen=True)
class Tile:
    """What a program attends with at a time."""

    rows: int
    tokens: int
    warps: int
    stages: int


def pick_tile(head_dim: int, *, large: bool) -> Tile:
    """Return a tile that fits; large: a program may use 200 KB of shared memory."""
    if large:
        return Tile(128, 64, 8, 2) if head_dim == 256 else Tile(128, 128, 8, 2)
    return Tile(64, 32, 8, 1) if head_dim == 256 else Tile(64, 32, 4, 2)


def attend_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    first: int | None = None,
    window: int | None = None,
    splits: int = 1,
    page_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Attend on any card; see `_Piece` for `first` and `window`, `attend_torch` for the rest.

    A split is a multiple of `page_tokens`.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads, tokens, _ = keys.shape
    out = torch.empty((splits, *q.shape), dtype=q.dtype, device=q.device)
    lse = torch.empty((splits, num_heads, rows), device=q.device)
    large = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] in {9, 10}
    tile = pick_tile(head_dim, large=large)
    attend_kernel[triton.cdiv(rows, tile.rows), num_heads, splits](
        q, keys, values, out, lse, scale * log2(e), rows, tokens, first or 0,
        window or _NO_WINDOW, num_heads, num_heads // num_kv_heads, DIM=head_dim, M=tile.rows,
        N=min(tile.tokens, page_tokens), CAUSAL=first is not None, WINDOWED=window is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def _pad(q: Tensor, front: int, out: Tensor) -> None:
    width = q.shape[1] * q.shape[2]
    pad_kernel[len(out), triton.cdiv(width, 2048)](
        q, out, front, len(q), q.stride(0), WIDTH=width, BLOCK=2048, num_warps=4
    )


def _check(q: Tensor, keys: Tensor, page_tokens: int) -> None:
    head_dim = q.shape[2]
    if head_dim not in (64, 128, 256) or q.stride()[1:] != (head_dim, 1):
        raise KernelInputError(
            f"q {tuple(q.shape)} is not [N, Hq, 64, 128 or 256], rows contiguous"
        )
    if page_tokens < 32 or page_tokens & (page_tokens - 1):
        raise KernelInputError(f"pages of {page_tokens} tokens")
    if keys.dtype != torch.float16 or keys.stride()[1:] != (page_tokens * head_dim, head_dim, 1):
        raise KernelInputError(f"keys are {keys.dtype} of strides {keys.stride()}")
