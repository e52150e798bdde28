"""Cached keys and values: errors, hard groups, chunks, sizes; kernel against reference."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import (
    KvFormat,
    cache_bytes,
    check_finite,
    decode_pages,
    encode_pages,
    page_layout,
    rotate,
)
from ragflash_kernels.kv_codec.formats import LEVEL_UNITS, TQ3_LEVELS, TQ4_LEVELS, signs
from tests.kernels.guarded import GuardedMemory

QUANTISED = [f for f in KvFormat if f is not KvFormat.F16]
SQUARE_ERROR = {  # relative, of a normal distribution
    KvFormat.F16: 1e-7,
    KvFormat.Q8_0: 3.3e-5,
    KvFormat.Q4_0: 0.0078,
    KvFormat.TQ4: 0.0096,
    KvFormat.TQ3_0: 0.0295,
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(x: torch.Tensor, kv_format: KvFormat, **options) -> torch.Tensor:
    pages = encode_pages(x, kv_format, **options)
    return decode_pages(pages, kv_format, page_tokens=x.shape[2], head_dim=x.shape[3])


def square_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().sum() / expected.square().sum())


@pytest.mark.parametrize("kv_format", KvFormat)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_error_of_normal_values(kv_format, head_dim):
    x = normal(2, 2, 256, head_dim) * 3
    assert square_error(round_trip(x, kv_format), x) < SQUARE_ERROR[kv_format]


@pytest.mark.parametrize("kv_format", [f for f in QUANTISED if f.rotated])
def test_rotation_makes_outliers_harmless(kv_format):
    x = normal(1, 1, 256, 128)
    x[..., [3, 77]] *= 30
    assert square_error(round_trip(x, kv_format), x) < SQUARE_ERROR[kv_format]


@pytest.mark.parametrize("head_dim", [32, 64, 128, 384])
def test_rotation_keeps_products_and_comes_back(head_dim):
    x, y = normal(5, head_dim), normal(5, head_dim, seed=1)
    a, b = rotate(x), rotate(y)
    assert torch.allclose((a * b).sum(1), (x * y).sum(1), atol=1e-4)
    assert torch.allclose(rotate(a, inverse=True), x, atol=1e-5)


def test_rotation_is_signs_transform_signs():
    matrix = torch.tensor([[1.0]])
    for _ in range(5):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    first, last = (torch.tensor(signs(i, 32), dtype=torch.float32) for i in (0, 1))
    x = normal(3, 32)
    assert torch.allclose(rotate(x), ((x * first) @ matrix) * last / 32**0.5, atol=1e-5)


def test_signs_never_change():  # what is stored under others is garbage
    def text(which: int) -> str:
        return "".join("+-"[sign < 0] for sign in signs(which, 24))

    assert text(0) == SIGNS[0]
    assert text(1) == SIGNS[1]


SIGNS = ("-+++++--++---+--+-++-+-+", "+-+--------+-+-+++++++-+")


@pytest.mark.parametrize(("levels", "count"), [(TQ3_LEVELS, 4), (TQ4_LEVELS, 8)])
def test_levels_are_best_for_a_normal_distribution(levels, count):
    """Each level is the mean of the values nearest to it (Lloyd 1982)."""
    x = normal(400_000).abs()
    table = torch.tensor(levels) / LEVEL_UNITS
    assert len(table) == count
    nearest = (x[:, None] - table).abs().argmin(1)
    means = torch.stack([x[nearest == i].mean() for i in range(count)])
    assert torch.allclose(means, table, atol=8e-3)


@pytest.mark.parametrize("kv_format", KvFormat)
def test_hard_groups(kv_format):
    x = torch.zeros(1, 1, 4, 128)
    x[0, 0, 1, 7] = 65504
    x[0, 0, 2] = 6e-8
    x[0, 0, 3] = 65504
    y = round_trip(x, kv_format)
    assert not y[0, 0, 0].any()
    assert y.isfinite().all()
    bound = 0.1 if kv_format is KvFormat.Q4_0 else 0.01  # of equal amplitudes, +7 stands for +8
    assert (y[0, 0, 1] - x[0, 0, 1]).norm() < bound * 65504
    assert (y[0, 0, 2] - x[0, 0, 2]).abs().max() < 2e-6


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_show_and_are_named(kv_format, value):
    x = normal(1, 2, 3, 128)
    x[0, 1, 2, 5] = value
    y = round_trip(x, kv_format)
    assert y[0, 1, 2].isnan().any()
    assert y[0, 0].isfinite().all()
    with pytest.raises(KernelInputError, match="layer 3, keys: page 0, head 1, token 2, channel 5"):
        check_finite(x, label="layer 3, keys")


def test_a_constant_offset_of_keys_is_taken_off_first():
    keys = normal(1, 1, 256, 128)
    keys[..., 17] += 600
    queries = normal(64, 128, seed=1)
    exact = queries @ keys[0, 0].T

    def correlation(decoded: torch.Tensor) -> float:
        logits = queries @ decoded[0, 0].T
        both = torch.stack([
            (logits - logits.mean(1, keepdim=True)).flatten(),
            (exact - exact.mean(1, keepdim=True)).flatten(),
        ])  # fmt: skip
        return float(both.corrcoef()[0, 1])

    offsets = keys.mean(2)[0]
    assert correlation(round_trip(keys, KvFormat.TQ3_0, offsets=offsets)) > 0.97
    assert correlation(round_trip(keys, KvFormat.TQ3_0)) < 0.5  # why offsets are there


@pytest.mark.parametrize("head_dim", [32, 64, 256])
@pytest.mark.parametrize("tokens", [32, 64, 96, 128])
def test_values_are_laid_out_in_another_way_but_decode_to_the_same(head_dim, tokens):
    x = normal(2, 2, tokens, head_dim)
    pages = encode_pages(x, KvFormat.TQ3_0, values=True)
    assert not torch.equal(pages, encode_pages(x, KvFormat.TQ3_0))
    found = decode_pages(pages, KvFormat.TQ3_0, page_tokens=tokens, head_dim=head_dim, values=True)
    assert torch.equal(found, round_trip(x, KvFormat.TQ3_0))


@pytest.mark.parametrize("values", [False, True])
def test_codes_and_scales_of_tq3_are_where_a_thread_reads_them(values):
    head_dim, tokens = 128, 128
    layout = page_layout(KvFormat.TQ3_0, tokens, head_dim)
    page = encode_pages(normal(1, 1, tokens, head_dim), KvFormat.TQ3_0, values=values)
    decoded = decode_pages(
        page, KvFormat.TQ3_0, page_tokens=tokens, head_dim=head_dim, values=values, rotated=True
    )[0, 0]
    low, high = page[0, 0, : layout.high], page[0, 0, layout.high : layout.scales]
    scales = page[0, 0, layout.scales :].view(torch.float16)
    for t, d in ((0, 0), (1, 40), (9, 127), (22, 3), (63, 16), (64, 8), (101, 77), (127, 127)):
        block, c = d // 32, d % 32 // 8
        group, nibble, scale = (t * 4 + c) * 4 + block, d % 8, t * 4 + block
        if values:
            part, tile, pair = t // 64 * 4 + block, t % 64 // 16, t % 8 // 2
            lane, of_four = d % 8 * 4 + pair, t % 16 // 8 * 2 + t % 2
            group = ((part * 32 + lane) * 4 + tile) * 2 + d % 32 // 16
            nibble = d % 16 // 8 * 4 + of_four
            scale = ((part * 4 + pair) * 4 + tile) * 4 + of_four
        words = low.view(torch.int32), high.view(torch.int32)
        level = int(words[0][group // 2]) >> (4 * nibble + 2 * (group % 2)) & 3
        sign = int(words[1][group // 4]) >> (4 * nibble + group % 4) & 1
        expected = TQ3_LEVELS[level] / LEVEL_UNITS * float(scales[scale]) * (1 - 2 * sign)
        assert float(decoded[t, d]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kv_format", KvFormat)
@pytest.mark.parametrize("chunk", [1, 16, 75])
def test_chunks_do_not_change_what_is_stored(kv_format, chunk):
    x = normal(1, 1, 100, 64)
    apart = [round_trip(part, kv_format) for part in x.split(chunk, 2)]
    assert torch.equal(torch.cat(apart, 2), round_trip(x, kv_format))


@pytest.mark.parametrize(
    ("kv_format", "tokens", "expected"),
    [
        (KvFormat.TQ3_0, 65536, 939_524_096),
        (KvFormat.TQ3_0, 131072, 1_879_048_192),
        (KvFormat.TQ3_0, 138696, 1_988_345_856),
        (KvFormat.TQ3_0, 262144, 3_758_096_384),
        (KvFormat.F16, 138696, 9_089_581_056),
    ],
)
def test_bytes_of_a_27b_hybrid(kv_format, tokens, expected):
    assert (
        2 * cache_bytes(kv_format, layers=16, kv_heads=4, head_dim=256, tokens=tokens) == expected
    )


def test_bits_of_a_value():
    bits = {f: 8 * page_layout(f, 256, 256).size / 65536 for f in KvFormat}
    assert bits == {"f16": 16, "q8_0": 8.5, "q4_0": 4.5, "tq4": 4.125, "tq3_0": 3.5}


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_interpreted_kernel_gives_the_same_bytes(kv_format, head_dim, monkeypatch):
    pytest.importorskip("triton")
    guard = GuardedMemory()
    x = guard.place((normal(2, 2, 11, head_dim) * 3).half())
    offsets = guard.place(normal(2, head_dim, seed=1))
    expected = encode_pages(x, kv_format, offsets=offsets)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        pages = encode_pages(x, kv_format, offsets=offsets, backend=Backend.TRITON)
    guard.check()
    assert torch.equal(pages, expected)


@pytest.mark.parametrize(("head_dim", "tokens"), [(32, 96), (64, 64)])
def test_interpreted_kernel_gives_the_same_bytes_of_values(head_dim, tokens, monkeypatch):
    pytest.importorskip("triton")
    guard = GuardedMemory()
    x = guard.place(normal(1, 2, tokens, head_dim).half())
    expected = encode_pages(x, KvFormat.TQ3_0, values=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        pages = encode_pages(x, KvFormat.TQ3_0, values=True, backend=Backend.TRITON)
    guard.check()
    assert torch.equal(pages, expected)


def test_interpreted_rotation_gives_the_same_bits():
    pytest.importorskip("triton")
    x = normal(3, 2, 128)
    for inverse in (False, True):
        found = rotate(x, inverse=inverse, backend=Backend.TRITON)
        assert torch.equal(found, rotate(x, inverse=inverse))


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(1, 1, 1, 48), {}, "48"),
        (torch.zeros(1, 1, 32), {}, "1, 1, 32"),
        (torch.zeros(1, 1, 1, 32, dtype=torch.int32), {}, "int32"),
        (torch.zeros(1, 1, 32, 32).transpose(2, 3), {}, "floats"),
        (torch.zeros(1, 1, 1, 32), {"offsets": torch.zeros(2, 32)}, "offsets"),
        (torch.zeros(1, 1, 1, 32), {"out": torch.zeros(1, 1, 14)}, "out"),
        (torch.zeros(1, 1, 1, 384), {"backend": Backend.TRITON}, "384"),
        (torch.zeros(1, 1, 48, 64), {"values": True}, "48 values a page"),
    ],
)
def test_pages_that_cannot_be_encoded_are_refused(x, options, message):
    with pytest.raises(KernelInputError, match=message):
        encode_pages(x, KvFormat.TQ3_0, **options)


def test_bytes_of_another_format_are_refused():
    pages = encode_pages(torch.zeros(1, 1, 2, 32), KvFormat.TQ3_0)
    with pytest.raises(KernelInputError, match="28"):
        decode_pages(pages, KvFormat.Q8_0, page_tokens=2, head_dim=32)
