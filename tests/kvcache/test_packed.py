"""Packed pages: what they hold, and that attention reads both forms as one text."""

from dataclasses import replace

import pytest
import torch

from ragflash.kvcache.allocator import PageAllocator, PageForm
from ragflash.kvcache.formats import KV_FORMATS, KVFormatName
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.pages import (
    KVLayout,
    KVPages,
    LayerKV,
    PackedPool,
    PagePool,
    packed_page_bytes,
)
from ragflash.kvcache.table import PageConversion, PageCopy
from ragflash.models.contract import ForwardBatch, SequenceRows
from ragflash.models.layers import PagedKV, Step
from ragflash_kernels.kv_codec import decode_pages, encode_pages

LAYOUT = KVLayout((LayerKV(2, 32), LayerKV(1, 64)), torch.float32)
PACKED: list[KVFormatName] = [name for name in KV_FORMATS if name != "f16"]


def filled_pool(num_pages: int) -> PagePool:
    pool = PagePool(LAYOUT, num_pages)
    generator = torch.Generator().manual_seed(0)
    for page in range(num_pages):
        pool.page(page).copy_(torch.randn(LAYOUT.page_values, generator=generator))
    return pool


@pytest.mark.parametrize("kv_format", PACKED)
def test_pages_take_what_the_format_says(kv_format):
    pool = PackedPool(LAYOUT, kv_format, 3)
    values = LAYOUT.page_values
    stored = KV_FORMATS[kv_format].stored_bytes(values)
    if kv_format == "tq4":
        assert packed_page_bytes(LAYOUT, kv_format) <= stored  # a scale for a whole head
    else:
        assert packed_page_bytes(LAYOUT, kv_format) == stored
    assert pool.nbytes == 3 * packed_page_bytes(LAYOUT, kv_format)
    assert pool.page(1).is_contiguous()


@pytest.mark.parametrize("kv_format", PACKED)
def test_layers_that_are_alike_are_packed_as_they_are_alone(kv_format):
    wide, narrow = LayerKV(2, 32), LayerKV(1, 64)
    layers = (wide, wide, narrow, wide, wide, wide)
    offsets = [None, None, None, None, torch.ones(2, 32), None]
    exact = PagePool(KVLayout(layers, torch.float32), 2)
    generator = torch.Generator().manual_seed(0)
    exact.page(1).copy_(torch.randn(exact.page(1).shape, generator=generator))
    pool = PackedPool(exact.layout, kv_format, 3, offsets=offsets)
    pool.encode(exact, [PageConversion(1, 2)])
    for layer, offset in enumerate(offsets):
        keys = encode_pages(exact.keys(layer)[[1]], pool.kv_format, offsets=offset)
        values = encode_pages(exact.values(layer)[[1]], pool.kv_format, values=True)
        assert torch.equal(pool.keys(layer)[[2]], keys)
        assert torch.equal(pool.values(layer)[[2]], values)


@pytest.mark.parametrize("kv_format", PACKED)
def test_pages_are_packed_in_all_layers_and_no_others_change(kv_format):
    exact, pool = filled_pool(4), PackedPool(LAYOUT, kv_format, 5)
    for page in range(5):
        pool.page(page).fill_(7)
    pool.encode(exact, [PageConversion(3, 1), PageConversion(0, 4)])
    for layer in range(2):
        for values, packed, floats in (
            (False, pool.keys(layer), exact.keys(layer)),
            (True, pool.values(layer), exact.values(layer)),
        ):
            encoded = encode_pages(floats[[3, 0]], pool.kv_format, values=values)
            assert torch.equal(packed[[1, 4]], encoded)
        keys, _ = pool.decode(layer, (4, 1))
        head_dim = LAYOUT.layers[layer].head_dim
        expected = decode_pages(
            pool.keys(layer)[[4, 1]], pool.kv_format, page_tokens=256, head_dim=head_dim
        )
        assert torch.equal(keys, expected)
    assert all((pool.page(page) == 7).all() for page in (0, 2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", PACKED)
def test_a_card_packs_and_copies_the_same_bytes(kv_format):
    layout = KVLayout((LayerKV(4, 256), LayerKV(2, 128)), torch.float16)
    packed, exact = [], []
    for device in ("cpu", "cuda"):
        pool, target = PagePool(layout, 5, device), PackedPool(layout, kv_format, 4, device)
        generator = torch.Generator().manual_seed(3)
        for page in range(3):
            values = torch.randn(layout.page_values, generator=generator)
            pool.page(page).copy_(values.half())
        pages = KVPages(pool, target)
        pages.copy([PageCopy(2, 4, 256), PageCopy(0, 3, 256), PageCopy(1, 3, 100)])
        pages.convert([PageConversion(4, 2), PageConversion(3, 0), PageConversion(1, 3)])
        packed.append(torch.stack([target.page(page).cpu() for page in (0, 2, 3)]))
        exact.append(torch.stack([pool.page(page).cpu() for page in (3, 4)]))
    assert torch.equal(*packed)
    assert torch.equal(*exact)


def rows_of(num_rows: int, committed: int) -> SequenceRows:
    """A sequence whose pages 1 … 3 are packed."""
    return SequenceRows(0, num_rows, committed, (5, 0, 3), (), packed_pages=(2, 0, 1))


def test_rows_are_written_behind_the_exact_tokens():
    pages = KVPages(filled_pool(6), PackedPool(LAYOUT, "q8_0", 3))
    k, v = torch.randn(2, 60, 2, 32)
    step = Step(batch_of(rows_of(60, 4 * 256 + 240)), pages, ())
    PagedKV(0, 1.0).store(k, v, step)
    assert torch.equal(pages.exact.keys(0)[0, :, 240:], k[:16].transpose(0, 1))
    assert torch.equal(pages.exact.values(0)[3, :, :44], v[16:].transpose(0, 1))


def batch_of(*sequences: SequenceRows) -> ForwardBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(nothing, nothing, sequences)


@pytest.mark.parametrize("window", [None, 300, 900])
@pytest.mark.parametrize("num_rows", [1, 5, 100])
def test_attention_reads_both_forms_in_order_of_position(window, num_rows):
    exact = filled_pool(6)
    packed = PackedPool(LAYOUT, "tq3_0", 3)
    packed.encode(exact, [PageConversion(1, 2), PageConversion(2, 0), PageConversion(4, 1)])
    pages = KVPages(exact, packed)
    committed = 4 * 256 + 250 - num_rows
    rows, other = rows_of(num_rows, committed), replace(rows_of(3, 20), packed_pages=())
    q = torch.randn(num_rows + 3, 4, 32)
    attention = PagedKV(0, 0.2, window)
    found = attention.read(q, Step(batch_of(other, rows), pages, ()))

    flat = PagePool(LAYOUT, 5)
    keys, values = packed.decode(0, (2, 0, 1))
    flat.keys(0).copy_(torch.cat((exact.keys(0)[[5]], keys, exact.keys(0)[[0]])))
    flat.values(0).copy_(torch.cat((exact.values(0)[[5]], values, exact.values(0)[[0]])))
    in_order = replace(rows, pages=(0, 1, 2, 3, 4), packed_pages=())
    wanted = attention.read(q[3:], Step(batch_of(in_order), KVPages(flat), ()))
    assert torch.equal(found[3:], wanted)
    alone = attention.read(q[:3], Step(batch_of(other), KVPages(exact), ()))
    assert torch.equal(found[:3], alone)


@pytest.mark.parametrize("kv_format", PACKED)
def test_o08_zeros_and_single_spikes_stay_finite(kv_format):
    exact, pool = PagePool(LAYOUT, 2), PackedPool(LAYOUT, kv_format, 2)
    exact.page(0).zero_()
    exact.page(1).zero_()[::128] = 65504.0
    pool.encode(exact, [PageConversion(0, 0), PageConversion(1, 1)])
    for layer in range(2):
        keys, values = pool.decode(layer, (0, 1))
        assert (keys[0] == 0).all()
        assert (values[0] == 0).all()
        assert keys.isfinite().all()
        assert keys.abs().max() < 1.6 * 65504


def test_o09_a_constant_in_the_keys_is_taken_off_and_added_again():
    """Scores of packed keys without it, plus that of the constant, are the whole scores."""
    generator = torch.Generator().manual_seed(0)
    layout = KVLayout.uniform(1, 1, 128, torch.float32)
    keys = torch.randn(256, 128, generator=generator)
    keys[:, 17] += 600
    queries = torch.randn(64, 128, generator=generator)
    exact = PagePool(layout, 1)
    exact.keys(0)[0, 0] = keys
    exact.values(0)[0, 0] = torch.randn(256, 128, generator=generator)

    def centred_scores(offsets: torch.Tensor | None) -> torch.Tensor:
        pool = PackedPool(layout, "tq3_0", 1, offsets=[offsets])
        pool.encode(exact, [PageConversion(0, 0)])
        scores = queries @ pool.decode(0, (0,))[0][0, 0].T
        return scores - scores.mean(dim=1, keepdim=True)

    wanted = queries @ keys.T
    wanted -= wanted.mean(dim=1, keepdim=True)
    mean = keys.mean(dim=0, keepdim=True)

    def correlation(scores: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack((scores.flatten(), wanted.flatten())))[0, 1])

    assert correlation(centred_scores(None)) < 0.5
    assert correlation(centred_scores(mean)) > 0.97


def test_attention_to_both_forms_adds_the_constant_to_the_log_sum_of_the_packed_part():
    """What a kernel does that reads packed keys as they are; see `PackedPool.offsets`."""
    layout = KVLayout.uniform(1, 1, 32, torch.float32)
    generator = torch.Generator().manual_seed(1)
    exact = PagePool(layout, 2)
    for page in range(2):
        exact.page(page).copy_(torch.randn(layout.page_values, generator=generator))
    offsets = 3 * torch.randn(1, 32, generator=generator)
    exact.keys(0).add_(offsets[:, None])
    packed = PackedPool(layout, "q8_0", 1, offsets=[offsets])
    packed.encode(exact, [PageConversion(1, 0)])
    pages = KVPages(exact, packed)
    rows = SequenceRows(0, 1, 656, (0, 0), (), packed_pages=(0,))
    q, scale = torch.randn(1, 1, 32, generator=generator), 0.3
    wanted = PagedKV(0, scale).read(q, Step(batch_of(rows), pages, ()))

    def part(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scale * keys @ q[0, 0]
        return scores.softmax(0) @ values, scores.logsumexp(0)

    newest = torch.cat((exact.keys(0)[0, 0], exact.keys(0)[0, 0, :-111]))
    newest_values = torch.cat((exact.values(0)[0, 0], exact.values(0)[0, 0, :-111]))
    old = (
        decode_pages(x, packed.kv_format, page_tokens=256, head_dim=32)[0, 0]
        for x in (packed.keys(0), packed.values(0))
    )
    mixed, sums = zip(part(newest, newest_values), part(*old), strict=True)
    shares = torch.stack((sums[0], sums[1] + scale * q[0, 0] @ offsets[0])).softmax(0)
    found = shares[0] * mixed[0] + shares[1] * mixed[1]
    assert torch.allclose(found, wanted.flatten(), atol=1e-4)


def test_o11_chunks_of_any_size_leave_the_same_bytes():
    k, v = torch.randn(2, 1000, 2, 32, generator=torch.Generator().manual_seed(2))
    layout = KVLayout.uniform(1, 2, 32, torch.float32)
    stored = []
    for size in (1, 64, 300, 1000):
        grid = Grid(256)
        books = PageAllocators(PageAllocator(3), PageAllocator(2, PageForm.PACKED), grid)
        pages = KVPages(PagePool(layout, 3), PackedPool(layout, "tq3_0", 2))
        assert pages.packed is not None
        table = books.new_table()
        table.reserve(1000)
        while table.length < 1000:
            count = min(size, table.room, 1000 - table.length)
            at = slice(table.length, table.length + count)
            rows = SequenceRows(
                0, count, table.length, table.pages, (), packed_pages=table.packed_pages
            )
            PagedKV(0, 1.0).store(k[at], v[at], Step(batch_of(rows), pages, ()))
            pages.convert(table.advance(count))
        kept = [pages.packed.page(page) for page in table.packed_pages]
        newest = pages.in_order(0, table.pages, ())
        stored.append((torch.stack(kept), *(x.transpose(1, 2).reshape(-1, 64) for x in newest)))
    packed, keys, values = stored[0]
    assert packed.shape[0] == 1
    assert torch.equal(keys[256 : 1000 - 256], k[512:].flatten(1))
    for other in stored[1:]:
        assert torch.equal(other[0], packed)
        assert torch.equal(other[1][: 1000 - 256], keys[: 1000 - 256])
        assert torch.equal(other[2][: 1000 - 256], values[: 1000 - 256])
