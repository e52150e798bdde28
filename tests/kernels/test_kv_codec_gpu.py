"""The codec kernels on a card give the bytes of the reference on the CPU."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages, rotate
from tests.kernels.guarded import GuardedMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_format", [f for f in KvFormat if f is not KvFormat.F16])
def test_bytes_equal_those_of_the_cpu(kv_format, dtype, monkeypatch):
    for head_dim, tokens in ((32, 256), (64, 13), (128, 256), (256, 100), (512, 3)):
        guard = GuardedMemory()
        x = torch.randn(3, 2, tokens, head_dim, device="cuda").to(dtype) * 3
        x[0, 0, 0] = 0
        x[0, 0, 1, 5] = 65504
        x[0, 0, 2] = 6e-8
        x = guard.place(x)
        offsets = guard.place(torch.randn(2, head_dim, device="cuda"))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", guard.empty)
            pages = encode_pages(x, kv_format, offsets=offsets, backend=Backend.TRITON)
        guard.check()
        expected = encode_pages(x.cpu(), kv_format, offsets=offsets.cpu())
        assert torch.equal(pages.cpu(), expected), (head_dim, tokens)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_bytes_of_values_equal_those_of_the_cpu(head_dim, monkeypatch):
    for tokens in (32, 96, 256):
        guard = GuardedMemory()
        x = guard.place(torch.randn(3, 2, tokens, head_dim, device="cuda").half())
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", guard.empty)
            pages = encode_pages(x, KvFormat.TQ3_0, values=True, backend=Backend.TRITON)
        guard.check()
        assert torch.equal(pages.cpu(), encode_pages(x.cpu(), KvFormat.TQ3_0, values=True)), tokens


def test_values_that_are_not_finite_show():
    x = torch.randn(1, 2, 4, 128, device="cuda")
    x[0, 0, 1, 5] = float("nan")
    x[0, 1, 2, 5] = float("inf")
    for kv_format in KvFormat:
        if kv_format is KvFormat.F16:
            continue
        pages = encode_pages(x, kv_format, backend=Backend.TRITON)
        y = decode_pages(pages, kv_format, page_tokens=4, head_dim=128)
        assert y[0, 0, 1].isnan().any()
        assert y[0, 1, 2].isnan().any()
        assert y[0, :, [0, 3]].isfinite().all()


def test_rotation_equals_that_of_the_cpu():
    for shape in ((5, 64), (3, 7, 256), (2, 384)):
        x = torch.randn(shape, device="cuda")
        for inverse in (False, True):
            found = rotate(x, inverse=inverse, backend=Backend.TRITON)
            assert torch.equal(found.cpu(), rotate(x.cpu(), inverse=inverse))
