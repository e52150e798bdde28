"""Page tables: reservation, commitment, forks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, PagesExhausted
from ragflash.kvcache.table import PageCopy, PageTable


def table_of(allocator: PageAllocator, length: int) -> PageTable:
    table = PageTable(allocator)
    table.reserve(length)
    table.advance(length)
    return table


def test_reserves_whole_pages_as_tokens_need_them():
    allocator = PageAllocator(10)
    table = PageTable(allocator)
    table.reserve(1)
    assert table.pages == (0,)
    table.advance(1)
    table.reserve(255)
    assert table.pages == (0,)
    table.reserve(256)
    assert table.pages == (0, 1)
    assert table.length == 1


def test_a_failed_reservation_changes_nothing():
    allocator = PageAllocator(2)
    table = table_of(allocator, 100)
    with pytest.raises(PagesExhausted):
        table.reserve(600)
    assert (table.pages, table.length, allocator.num_free) == ((0,), 100, 1)


def test_commits_only_what_is_reserved():
    table = table_of(PageAllocator(2), 200)
    for num_tokens in (57, -1):
        with pytest.raises(ValueError, match="tokens in 1 pages"):
            table.advance(num_tokens)
    assert table.length == 200


@pytest.mark.parametrize(
    ("length", "pages", "copies"),
    [
        (0, (), ()),
        (1, (3,), (PageCopy(0, 3, 1),)),
        (256, (0,), ()),
        (300, (0, 3), (PageCopy(1, 3, 44),)),
        (512, (0, 1), ()),
        (700, (0, 1, 3), (PageCopy(2, 3, 188),)),
    ],
)
def test_a_fork_shares_whole_pages_and_copies_a_partial_one(length, pages, copies):
    table = table_of(PageAllocator(10), 700)
    fork, found = table.fork(length)
    assert (fork.pages, fork.length, found) == (pages, length, copies)


def test_a_fork_without_a_page_for_its_copy_takes_nothing():
    allocator = PageAllocator(3)
    table = table_of(allocator, 700)
    with pytest.raises(PagesExhausted):
        table.fork(300)
    assert [allocator.holders(page) for page in range(3)] == [1, 1, 1]
    with pytest.raises(ValueError, match="fork at 701"):
        table.fork(701)


@given(
    st.integers(0, 5 * PAGE_TOKENS),
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1), st.integers(0, 400)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_releasing_every_fork_in_any_order_frees_every_page(length, forks, random):
    allocator = PageAllocator(200)
    tables = [table_of(allocator, length)]
    for parent, share, more in forks:
        source = tables[parent % len(tables)]
        fork, _ = source.fork(int(source.length * share))
        fork.reserve(more)
        fork.advance(more)
        tables.append(fork)
    random.shuffle(tables)
    for index, table in enumerate(tables):
        assert all(allocator.holders(page) > 0 for t in tables[index:] for page in t.pages)
        table.release()
    assert allocator.num_free == 200
    assert (tables[0].pages, tables[0].length) == ((), 0)
