"""Packed pages: what they hold, and that attention reads both forms as one text."""

from dataclasses import replace

import pytest
import torch

from ragflash.kvcache.formats import KV_FORMATS, KVFormatName
from ragflash.kvcache.pages import (
    KVLayout,
    KVPages,
    LayerKV,
    PackedPool,
    PagePool,
    packed_page_bytes,
)
from ragflash.kvcache.table import PageConversion
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
