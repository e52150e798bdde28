"""Rows of a table as the file stores it, against `dequantize`."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.dequant import dequantize
from ragflash_kernels.embedding import gather_rows
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.quant_layout import BLOCK_FORMATS
from tests.kernels.guarded import GuardedMemory
from tests.kernels.quantised import SCALE_OFFSETS, random_blocks

IDS = (3, -1, 0, 4, 5, 2**31 - 1, 3)  # of a table of five rows


def random_table(name, columns, device="cpu"):
    """Five rows of at least so many values."""
    sizes = BLOCK_FORMATS[name]
    columns = -(-columns // sizes.elements_per_block) * sizes.elements_per_block
    if name in SCALE_OFFSETS:
        return random_blocks(name, 5, columns, seed=columns, device=device)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    generator = torch.Generator(device).manual_seed(columns)
    values = torch.randn(5, columns, generator=generator, device=device).to(dtype)
    return values.view(torch.uint8)


def check(name, table, token_ids, backend, monkeypatch, scale=2.5):
    guard = GuardedMemory()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = gather_rows(table, token_ids, name, scale=scale, backend=backend)
    if backend is not Backend.REFERENCE:
        guard.check()
    rows = dequantize(table.cpu(), block_format=name, dtype=torch.float32) * scale
    ids = token_ids.cpu()
    inside = (ids >= 0) & (ids < len(table))
    expected = torch.where(inside[:, None], rows[ids.clamp(0, len(table) - 1)], 0)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rows_are_those_of_dequantize(name, backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    table = GuardedMemory().place(random_table(name, 288))
    dtype = torch.int64 if name.startswith("Q") else torch.int32
    check(name, table, torch.tensor(IDS, dtype=dtype), backend, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rows_are_those_of_dequantize_on_a_card(name, pinned, monkeypatch):
    for columns in (576, 5120):
        table = random_table(name, columns, "cuda")
        table = table.cpu().pin_memory() if pinned else table
        check(name, table, torch.tensor(IDS, device="cuda"), Backend.GLUON, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_table_is_read_in_a_graph():
    table = random_table("Q6_K", 512).pin_memory()
    ids = torch.zeros(3, dtype=torch.int64, device="cuda")
    gather_rows(table, ids, "Q6_K")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gather_rows(table, ids, "Q6_K")
    ids.copy_(torch.tensor([4, 1, -1]))
    graph.replay()
    assert torch.equal(found, gather_rows(table, ids, "Q6_K"))
    assert found[:2].any(1).all()
    assert not found[2].any()


@pytest.mark.parametrize(
    ("table", "ids", "name", "message"),
    [
        (torch.zeros(2, 18, dtype=torch.uint8), torch.zeros(1).long(), "Q9", "Q9"),
        (torch.zeros(2, 18), torch.zeros(1).long(), "Q4_0", "float32"),
        (torch.zeros(2, 17, dtype=torch.uint8), torch.zeros(1).long(), "Q4_0", "17 bytes"),
        (torch.zeros(18, 18, dtype=torch.uint8).t()[:2], torch.zeros(1).long(), "Q4_0", "strides"),
        (torch.zeros(38, dtype=torch.uint8)[2:].view(2, 18), torch.zeros(1).long(), "Q4_0", "4"),
        (torch.zeros(2, 18, dtype=torch.uint8), torch.zeros(1), "Q4_0", "float32"),
        (torch.zeros(2, 18, dtype=torch.uint8), torch.zeros(4).long()[::2], "Q4_0", "contiguous"),
        (torch.zeros(2, 18, dtype=torch.uint8), torch.zeros(1).long().to("meta"), "Q4_0", "pinned"),
    ],
)
def test_what_does_not_fit_is_refused(table, ids, name, message):
    with pytest.raises(KernelInputError, match=message):
        gather_rows(table, ids, name)
