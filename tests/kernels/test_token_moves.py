"""Tokens moved from place to place of pages."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.token_moves import move_tokens
from tests.kernels.guarded import GuardedMemory

PAGE_TOKENS = 16
HEADS = ((3, 4), (1, 6), (2, 64))  # of layers: heads and their values
PAGE_VALUES = sum(heads * dim * PAGE_TOKENS for heads, dim in HEADS)
MOVES = ((2, 14, 2, 13), (2, 15, 2, 14), (0, 3, 2, 15), (0, 9, 0, 0))


def layout(device="cpu"):
    starts, strides, start = [], [], 0
    for heads, dim in HEADS:
        for head in range(heads):
            starts += [start + head * PAGE_TOKENS * dim + value for value in range(dim)]
            strides += [dim] * dim
        start += heads * dim * PAGE_TOKENS
    return tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, strides))


def token(pages, page, place):
    """Values of a token, layer after layer."""
    found, start = [], 0
    for heads, dim in HEADS:
        size = heads * dim * PAGE_TOKENS
        layer = pages[page, start : start + size].view(heads, PAGE_TOKENS, dim)
        found.append(layer[:, place].flatten())
        start += size
    return torch.cat(found)


def check(backend, dtype, device="cpu"):
    guard = GuardedMemory()
    pages = guard.place(torch.randn(4, PAGE_VALUES, device=device).to(dtype))
    before = pages.clone()
    move_tokens(pages, *layout(device), torch.tensor(MOVES, device=device), backend=backend)
    guard.check()
    sources = {(page, place): source for *source, page, place in MOVES}
    for page in range(4):
        for place in range(PAGE_TOKENS):
            source = sources.get((page, place), (page, place))
            assert torch.equal(token(pages, page, place), token(before, *source))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
def test_tokens_go_where_they_are_sent_and_nothing_else_changes(backend, dtype):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    check(backend, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_go_where_they_are_sent_on_a_card(dtype):
    check(None, dtype, "cuda")


def test_nothing_to_move():
    starts, strides = layout()
    pages = torch.randn(4, PAGE_VALUES)
    before = pages.clone()
    move_tokens(pages, starts, strides, torch.empty((0, 4), dtype=torch.int64))
    move_tokens(pages, starts[:0], strides[:0], torch.tensor(MOVES))
    assert torch.equal(pages, before)


def test_refuses_what_does_not_fit():
    starts, strides = layout()
    pages, moves = torch.randn(4, PAGE_VALUES), torch.tensor(MOVES)
    for arguments, message in (
        ((pages[:, 1:], starts, strides, moves), "contiguous"),
        ((pages, starts, strides[1:], moves), "starts"),
        ((pages, starts.long(), strides, moves), "must be int32"),
        ((pages, starts, strides, moves[:, :3]), "int64"),
        ((pages, starts, strides, moves.int()), "int64"),
    ):
        with pytest.raises(KernelInputError, match=message):
            move_tokens(*arguments)
