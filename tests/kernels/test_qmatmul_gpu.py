"""The product kernels on a card, against float64 on the same grid."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.qmatmul import pack_matrix, qmatmul, unpack_matrix
from ragflash_kernels.qmatmul.activations import quantize_rows
from ragflash_kernels.qmatmul.formats import RECORD_FORMATS
from tests.kernels.guarded import GuardedMemory
from tests.kernels.quantised import random_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {  # rows and columns of the matrix
    True: [(1, 256), (70, 768), (257, 2560)],  # formats of 256 values a block
    False: [(1, 32), (70, 576), (192, 896), (257, 2560)],
}


def exact(x: torch.Tensor, weight) -> torch.Tensor:
    q, scales = quantize_rows(x)
    grid = q.double().unflatten(1, (-1, 32)) * scales.double()[..., None]
    dense = unpack_matrix(weight, backend=Backend.REFERENCE)
    return grid.flatten(1) @ dense.double().t()


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.GLUON])
@pytest.mark.parametrize("name", RECORD_FORMATS)
def test_equals_the_reference_over_odd_shapes(name, backend, monkeypatch):
    for rows, columns in SHAPES[name in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")]:
        blocks = random_blocks(name, rows, columns, seed=rows, device="cuda")
        for num_rows in (1, 2, 7, 8, 9, 16, 21, 32):
            guard = GuardedMemory()
            weight = pack_matrix(blocks, block_format=name)
            weight = type(weight)(guard.place(weight.records), name, rows, columns)
            x = guard.place(torch.randn(num_rows, columns, device="cuda"))
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", guard.empty)
                y = qmatmul(x, weight, backend=backend)
            guard.check()
            expected = exact(x, weight)
            error = (y.double() - expected).norm() / expected.norm()
            assert error < 2e-6, (rows, columns, num_rows, float(error))


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.GLUON])
@pytest.mark.parametrize("name", RECORD_FORMATS)
def test_unpacks_to_the_bits_of_the_reference(name, backend, monkeypatch):
    for rows, columns in SHAPES[name in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")]:
        weight = pack_matrix(random_blocks(name, rows, columns, device="cuda"), block_format=name)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            guard = GuardedMemory()
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", guard.empty)
                found = unpack_matrix(weight, dtype=dtype, backend=backend)
            guard.check()
            expected = unpack_matrix(weight, backend=Backend.REFERENCE).to(dtype)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_0"])
def test_a_row_does_not_depend_on_the_others(name):
    weight = pack_matrix(random_blocks(name, 192, 5120, device="cuda"), block_format=name)
    x = torch.randn(32, 5120, device="cuda")
    together = qmatmul(x, weight, backend=Backend.GLUON)
    for num_rows in (1, 2, 8, 16, 21):
        assert torch.equal(qmatmul(x[-num_rows:], weight, backend=Backend.GLUON),
                           together[-num_rows:])  # fmt: skip


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="programmatic dependent launch is of sm_90",
)
@pytest.mark.parametrize("num_rows", [1, 16, 32])
def test_dependent_launch_changes_no_bit(num_rows):
    from ragflash_kernels.qmatmul.launch import qmatmul_gluon

    weight = pack_matrix(random_blocks("Q4_K", 2048, 2048, device="cuda"), block_format="Q4_K")
    x = torch.randn(num_rows, 2048, device="cuda")
    torch.cuda.synchronize()
    eager, waiting = x, x
    for _ in range(20):  # a chain, so that each product waits for the one before
        eager = qmatmul_gluon(eager, weight, eager=True)
        eager = eager / eager.norm()
        waiting = qmatmul_gluon(waiting, weight)
        waiting = waiting / waiting.norm()
    assert torch.equal(eager, waiting)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", RECORD_FORMATS)
def test_records_in_shared_memory_change_no_bit(name, eager):
    from ragflash_kernels.qmatmul.launch import multiply_into_splits, quantize_rows_triton

    if eager and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch is of sm_90")
    for columns in (768, 2560):
        weight = pack_matrix(random_blocks(name, 257, columns, device="cuda"), block_format=name)
        for num_rows in (1, 8, 16, 21, 32):
            x = quantize_rows_triton(torch.randn(num_rows, columns, device="cuda"))
            plain = multiply_into_splits(x, num_rows, weight)
            staged = multiply_into_splits(x, num_rows, weight, staged=True, eager=eager)
            assert torch.equal(plain, staged)


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.GLUON])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_activations_and_values_that_are_not_finite(dtype, backend):
    weight = pack_matrix(random_blocks("Q4_K", 64, 512, device="cuda"), block_format="Q4_K")
    x = torch.randn(3, 512, device="cuda").to(dtype)
    x[1, 7] = float("inf")
    x[2, 256:] = 0
    y = qmatmul(x, weight, backend=backend)
    assert y[1].isnan().all()
    expected = exact(x, weight)[[0, 2]]
    assert ((y[[0, 2]].double() - expected).norm() / expected.norm()) < 2e-6
