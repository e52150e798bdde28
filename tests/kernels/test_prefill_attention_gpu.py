"""Attention of chunks on a card, with the heads of real models, by every backend."""

import pytest
import torch

from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from ragflash_kernels.prefill_attention import (
    PrefillBackend,
    PrefillWorkspace,
    decode_pages_into,
    pick_prefill_backend,
    prefill_attention,
)
from ragflash_kernels.prefill_attention.backends import works
from tests.kernels.prefill_cases import ODD_LENGTHS, make_case, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS = {(24, 4): 256, (9, 3): 64, (4, 1): 256}
ON_CARD = [backend for backend in PrefillBackend if backend is not PrefillBackend.REFERENCE]
TQ3 = (KvFormat.TQ3_0, KvFormat.TQ3_0)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 6e-3}


def require(backend: PrefillBackend, head_dim: int) -> None:
    if backend is not PrefillBackend.TRITON and not works(
        backend, torch.device("cuda", 0), head_dim
    ):
        pytest.skip(f"this card or torch has no {backend} for heads of {head_dim}")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("backend", ON_CARD)
def test_equals_the_reference(backend, heads, dtype):
    head_dim = HEADS[heads]
    require(backend, head_dim)
    for num_rows, exact_before in ODD_LENGTHS:
        case = make_case(
            num_rows, exact_before, heads=heads, head_dim=head_dim, page_tokens=256, device="cuda",
            dtype=dtype,
        )  # fmt: skip
        found = case.run(backend, scale=head_dim**-0.5)
        expected = case.run(PrefillBackend.REFERENCE, scale=head_dim**-0.5)
        error = relative_error(found, expected)
        assert error < TOLERANCE[dtype], (num_rows, exact_before)


@pytest.mark.parametrize("packed_pages", [1, 50])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("backend", ON_CARD)
def test_sees_packed_history(backend, heads, packed_pages):
    head_dim = HEADS[heads]
    require(backend, head_dim)
    formats = TQ3 if head_dim == 256 else (KvFormat.Q8_0, KvFormat.Q4_0)
    for num_rows, exact_before in ((100, 255), (2048, 2304)):
        case = make_case(
            num_rows, exact_before, packed_pages, heads=heads, head_dim=head_dim, page_tokens=256,
            formats=formats, device="cuda", dtype=torch.bfloat16,
        )  # fmt: skip
        found = case.run(backend, scale=head_dim**-0.5, segment_tokens=4096)
        expected = case.run(PrefillBackend.REFERENCE, scale=head_dim**-0.5)
        error = relative_error(found, expected)
        assert error < TOLERANCE[torch.bfloat16], (num_rows, exact_before)


@pytest.mark.parametrize("num_rows", [33, 1000, 2048])
def test_a_window_hides_older_tokens(num_rows):
    for exact_before in (0, 300, 3000):
        case = make_case(
            num_rows, exact_before, heads=(4, 1), head_dim=256, page_tokens=256, device="cuda"
        )
        found = case.run(PrefillBackend.TRITON, scale=1 / 16, window=512)
        expected = case.run(PrefillBackend.REFERENCE, scale=1 / 16, window=512)
        assert relative_error(found, expected) < 2e-3, exact_before


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_format", [f for f in KvFormat if f is not KvFormat.F16])
def test_listed_pages_are_decoded_in_order(kv_format, head_dim, values):
    x = torch.randn(9, 2, 256, head_dim, device="cuda").half()
    pages = encode_pages(x, kv_format, values=values)
    listed = torch.tensor([8, 0, 3], dtype=torch.int32, device="cuda")
    out = torch.full((2, 768, head_dim), float("nan"), dtype=torch.float16, device="cuda")
    shape = {"page_tokens": 256, "head_dim": head_dim, "values": values}
    decode_pages_into(pages, listed, kv_format, out=out, **shape)
    plain = decode_pages(pages[listed.long()], kv_format, rotated=True, **shape)
    assert relative_error(out, plain.transpose(0, 1).flatten(1, 2)) < 5e-4


def test_what_the_workspace_holds_does_not_matter():
    case = make_case(300, 100, heads=(4, 1), head_dim=256, page_tokens=256, device="cuda")
    workspace = PrefillWorkspace(
        max_rows=300, num_heads=4, num_kv_heads=1, head_dim=256, device="cuda"
    )
    results = []
    for poison in (0.0, float("nan")):
        for buffer in workspace.buffers:
            buffer.fill_(poison)
        results.append(
            prefill_attention(
                case.q,
                case.exact_keys,
                case.exact_values,
                case.exact_pages,
                100,
                scale=1 / 16,
                workspace=workspace,
            )
        )
    assert torch.equal(*results)


def test_the_backend_of_this_card_works():
    backend = pick_prefill_backend(torch.device("cuda", 0), 256)
    assert backend is not PrefillBackend.REFERENCE
    assert pick_prefill_backend(torch.device("cuda", 0), 256, windowed=True) is (
        PrefillBackend.TRITON
    )
