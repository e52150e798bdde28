"""The page pool stores what it is given where the layout says."""

import pytest
import torch

from ragflash.kvcache.pages import KVLayout, LayerKV, PagePool
from ragflash.kvcache.table import PageCopy

LAYOUT = KVLayout.uniform(2, 3, 4, torch.float32)


def rows(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_rows, 3, 4, generator=generator)
    return k, v


def empty_pool(num_pages: int) -> PagePool:
    pool = PagePool(LAYOUT, num_pages)
    for page in range(num_pages):
        pool.page(page).fill_(float("nan"))
    return pool


def read(tensor: torch.Tensor, pages: tuple[int, ...]) -> torch.Tensor:
    """`[tokens, Hkv, D]` of the pages, in their order."""
    return torch.cat([tensor[page] for page in pages], dim=1).transpose(0, 1)


def test_sizes():
    assert LAYOUT.page_bytes == 2 * 2 * 3 * 256 * 4 * 4
    pool = PagePool(LAYOUT, 5)
    assert pool.nbytes == 5 * LAYOUT.page_bytes
    assert pool.page(3).is_contiguous()
    assert pool.page(3).shape == (2 * 2 * 3 * 256 * 4,)


@pytest.mark.parametrize("first", [0, 1, 255, 256, 300])
@pytest.mark.parametrize("num_rows", [1, 2, 256, 300])
def test_writes_rows_at_their_positions_and_nothing_else(first, num_rows):
    pages = (4, 1, 6)
    pool = empty_pool(7)
    k, v = rows(num_rows)
    pool.write(1, pages, first, k, v)
    for view, expected in ((pool.keys(1), k), (pool.values(1), v)):
        stored = read(view, pages)
        assert torch.equal(stored[first : first + num_rows], expected)
        assert stored[:first].isnan().all()
        assert stored[first + num_rows :].isnan().all()
        assert all(view[page].isnan().all() for page in (0, 2, 3, 5))
    assert pool.keys(0).isnan().all()
    assert pool.values(0).isnan().all()


def test_writing_rows_one_by_one_is_writing_them_at_once():
    once, one_by_one = empty_pool(2), empty_pool(2)
    k, v = rows(270)
    once.write(0, (1, 0), 5, k, v)
    for row in range(270):
        one_by_one.write(0, (1, 0), 5 + row, k[row : row + 1], v[row : row + 1])
    for page in range(2):
        assert torch.equal(once.page(page).nan_to_num(7), one_by_one.page(page).nan_to_num(7))


def test_copies_the_first_tokens_of_every_layer():
    pool = empty_pool(3)
    for layer in range(2):
        pool.write(layer, (2,), 0, *rows(256, seed=layer))
    pool.copy(PageCopy(src=2, dst=0, num_tokens=100))
    for layer in range(2):
        for view in (pool.keys(layer), pool.values(layer)):
            assert torch.equal(view[0, :, :100], view[2, :, :100])
            assert view[0, :, 100:].isnan().all()
    assert pool.page(1).isnan().all()


def test_layers_of_different_shapes_lie_one_after_the_other():
    layout = KVLayout((LayerKV(1, 4), LayerKV(3, 2)), torch.float32)
    pool = PagePool(layout, 2)
    assert layout.page_values == 2 * 256 * (1 * 4 + 3 * 2)
    pool.page(1).copy_(torch.arange(layout.page_values))
    assert pool.keys(0)[1].flatten().tolist() == [*range(1024)]
    assert pool.keys(1)[1].flatten()[0] == 2 * 1024
    assert pool.values(1).shape == (2, 3, 256, 2)
    assert pool.values(1)[1, 2, 255, 1] == layout.page_values - 1
    pool.page(0).fill_(float("nan"))
    pool.copy(PageCopy(src=1, dst=0, num_tokens=7))
    assert torch.equal(pool.values(1)[0, :, :7], pool.values(1)[1, :, :7])
    assert pool.values(1)[0, :, 7:].isnan().all()


def test_a_model_without_attention_has_pages_of_no_bytes():
    layout = KVLayout((), torch.float32)
    assert layout.page_bytes == 0
    PagePool(layout, 2).copy(PageCopy(0, 1, 10))


def test_moved_tokens_are_where_they_were_sent():
    """In layers of different shapes, over the edge of a page."""
    layout = KVLayout((LayerKV(3, 4), LayerKV(1, 6)), torch.float32)
    pool, pages = PagePool(layout, 4), (3, 0)
    generator = torch.Generator().manual_seed(0)
    for page in range(4):
        pool.page(page).copy_(torch.randn(pool.page(page).shape, generator=generator))
    moves = [(254, 253), (256, 254), (257, 255), (300, 256)]
    before = [
        read(view(layer), pages).clone() for layer in (0, 1) for view in (pool.keys, pool.values)
    ]
    others = pool.page(1).clone(), pool.page(2).clone()
    pool.move(pages, moves)
    after = [read(view(layer), pages) for layer in (0, 1) for view in (pool.keys, pool.values)]
    for old, new in zip(before, after, strict=True):
        expected = old.clone()
        for source, target in moves:
            expected[target] = old[source]
        assert torch.equal(new, expected)
    assert torch.equal(pool.page(1), others[0])
    assert torch.equal(pool.page(2), others[1])


def test_nothing_moves_where_there_is_no_attention():
    pool = PagePool(KVLayout((), torch.float32), 2)
    pool.move((0, 1), [(3, 2)])
    assert pool.page(0).nbytes == pool.page(1).nbytes == 0
