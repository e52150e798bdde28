"""Two forms of pages: position alone decides which is read, and nothing is converted twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, PageForm, PagesExhausted
from ragflash.kvcache.grid import Grid, GridTable, PageAllocators
from ragflash.kvcache.table import KVTable, PageConversion, PageCopy

GRID = Grid(512)


def allocators(num_exact: int = 40, num_packed: int = 40, grid: Grid = GRID) -> PageAllocators:
    packed = PageAllocator(num_packed, PageForm.PACKED)
    return PageAllocators(PageAllocator(num_exact), packed, grid)


class Tokens:
    """Simulates both pools: each place holds the position that was written there."""

    def __init__(self) -> None:
        self.exact: dict[tuple[int, int], int] = {}
        self.packed: dict[int, list[int]] = {}
        self.num_conversions: dict[int, int] = {}

    def grow(self, table: KVTable, num_tokens: int) -> None:
        """Write and commit tokens, as few forwards as the table allows."""
        while num_tokens:
            count = min(num_tokens, table.room)
            before = len(table.packed_pages) * PAGE_TOKENS
            for position in range(table.length, table.length + count):
                page, place = divmod(position - before, PAGE_TOKENS)
                self.exact[table.pages[page], place] = position
            for conversion in table.advance(count):
                page = [self.exact[conversion.exact, place] for place in range(PAGE_TOKENS)]
                self.packed[conversion.packed] = page
                number = self.num_conversions.get(page[0], 0)
                self.num_conversions[page[0]] = number + 1
            num_tokens -= count

    def copy(self, copies: tuple[PageCopy, ...]) -> None:
        for copy in copies:
            for place in range(PAGE_TOKENS):
                self.exact.pop((copy.dst, place), None)
            for place in range(copy.num_tokens):
                self.exact[copy.dst, place] = self.exact[copy.src, place]

    def read(self, table: KVTable) -> list[int]:
        """Positions in the order of the table's pages."""
        num_exact = table.length - len(table.packed_pages) * PAGE_TOKENS
        exact = [
            self.exact[table.pages[index // PAGE_TOKENS], index % PAGE_TOKENS]
            for index in range(num_exact)
        ]
        packed = [position for page in table.packed_pages for position in self.packed[page]]
        return exact[:PAGE_TOKENS] + packed + exact[PAGE_TOKENS:]


def test_blocks_are_of_whole_pages():
    for tokens in (0, 100, 255, 300):
        with pytest.raises(ValueError, match="grid"):
            Grid(tokens)


@pytest.mark.parametrize("grid", [Grid(256), GRID, Grid(2048)])
def test_the_first_page_and_two_blocks_are_read_exactly(grid):
    for position in [0, *(n * grid.tokens + d for n in range(1, 6) for d in (-1, 0, 1))]:
        first_exact = (position // grid.tokens - 1) * grid.tokens
        packed = [page for page in range(1, 100) if (page + 1) * PAGE_TOKENS <= first_exact]
        assert grid.num_packed(position) == len(packed)
        num_exact = position // PAGE_TOKENS + 1 - len(packed)
        assert num_exact <= grid.most_exact_pages
        assert grid.rows_left(position) + position == (position // grid.tokens + 1) * grid.tokens


def test_pages_are_packed_at_an_edge_and_used_again():
    books = allocators()
    table = books.new_table()
    table.reserve(2000)
    assert table.pages == (0, 1, 2, 3, 4)
    assert table.packed_pages == ()
    assert [table.advance(512), table.advance(511)] == [(), ()]
    assert table.room == 1
    assert table.advance(1) == (PageConversion(1, 0),)
    assert (table.pages, table.packed_pages) == ((0, 2, 3, 4, 1), (0,))
    assert table.advance(512) == (PageConversion(2, 1), PageConversion(3, 2))
    assert (table.pages, table.packed_pages) == ((0, 4, 1, 2, 3), (0, 1, 2))
    assert table.room == 2000 - 1536


def test_rows_do_not_cross_an_edge_nor_leave_what_is_reserved():
    table = allocators().new_table()
    table.reserve(700)
    assert table.room == 512
    with pytest.raises(ValueError, match="513 tokens after 0"):
        table.advance(513)
    table.advance(512)
    assert table.room == 188


def test_a_failed_reservation_or_fork_changes_nothing():
    books = allocators(num_exact=6, num_packed=2)
    table = books.new_table()
    with pytest.raises(PagesExhausted) as lacking:
        table.reserve(2048)
    assert (lacking.value.form, lacking.value.wanted) == (PageForm.PACKED, 5)
    assert (books.num_free, table.room) == (8, 0)
    table.reserve(1100)
    Tokens().grow(table, 1100)
    with pytest.raises(PagesExhausted) as lacking:
        table.fork(1100)
    assert (lacking.value.form, lacking.value.wanted, lacking.value.free) == ("exact", 4, 1)
    assert books.of(PageForm.PACKED).holders(0) == 1


def test_a_fork_copies_exact_pages_and_shares_packed_ones():
    books, tokens = allocators(), Tokens()
    table = books.new_table()
    table.reserve(1300)
    tokens.grow(table, 1300)
    fork, copies = table.fork(1290)
    assert copies == (
        PageCopy(0, 5, 256),
        PageCopy(2, 6, 256),
        PageCopy(3, 7, 256),
        PageCopy(4, 8, 256),
        PageCopy(1, 9, 10),
    )
    assert fork.packed_pages == table.packed_pages == (0,)
    assert books.of(PageForm.PACKED).holders(0) == 2
    with pytest.raises(ValueError, match="fork at 1023 of 1300 tokens, 1 pages"):
        table.fork(1023)
    with pytest.raises(ValueError, match="fork at 1301"):
        table.fork(1301)


def test_forks_at_every_place_of_a_page_read_their_tokens():
    books, tokens = allocators(), Tokens()
    table = books.new_table()
    table.reserve(1535)
    tokens.grow(table, 1535)
    for length in range(1280, 1536):
        fork, copies = table.fork(length)
        tokens.copy(copies)
        assert tokens.read(fork) == [*range(length)]
        fork.release()
    assert tokens.read(table) == [*range(1535)]


def test_a_long_sequence_needs_no_page_while_it_runs():
    books = allocators(num_exact=5, num_packed=17)
    table = books.new_table()
    table.reserve(books.most_tokens)
    assert table.length == 0
    free, tokens = books.num_free, Tokens()
    tokens.grow(table, books.most_tokens)
    assert books.num_free == free == 0
    assert tokens.read(table) == [*range(books.most_tokens)]
    with pytest.raises(PagesExhausted):
        table.reserve(1)
    table.release()
    assert books.num_free == 22


@pytest.mark.parametrize(("num_exact", "num_packed"), [(1, 1), (3, 9), (4, 1), (5, 1), (9, 6)])
def test_the_longest_sequence_fits_and_no_longer_one(num_exact, num_packed):
    books = allocators(num_exact, num_packed)
    books.new_table().reserve(books.most_tokens)
    for longer in (1, 256):
        with pytest.raises(PagesExhausted):
            allocators(num_exact, num_packed).new_table().reserve(books.most_tokens + longer)


def test_exact_pages_alone_are_one_form():
    books = PageAllocators(PageAllocator(3))
    assert (books.num_pages, books.num_free, books.most_tokens) == (3, 3, 768)
    with pytest.raises(ValueError, match="no packed pages"):
        books.of(PageForm.PACKED)


@settings(max_examples=50)
@given(
    st.integers(0, 1400),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 255), st.integers(0, 700)), max_size=6),
    st.sampled_from([Grid(256), GRID]),
    st.randoms(use_true_random=False),
)
def test_forks_read_their_tokens_and_release_every_page(length, forks, grid, random):
    books, tokens = allocators(100, 100, grid), Tokens()
    for allocator in (books.exact, books.of(PageForm.PACKED)):
        random.shuffle(allocator._free)
    tables = [books.new_table()]
    tables[0].reserve(length)
    tokens.grow(tables[0], length)
    for parent, back, more in forks:
        source = tables[parent % len(tables)]
        at = max(0, source.length - back)
        if grid.num_packed(at) != grid.num_packed(source.length):
            at = source.length
        fork, copies = source.fork(at)
        tokens.copy(copies)
        fork.reserve(more)
        tokens.grow(fork, more)
        tables.append(fork)
    for table in tables:
        assert isinstance(table, GridTable)
        assert tokens.read(table) == [*range(table.length)]
        assert len(table.packed_pages) == grid.num_packed(table.length)
    random.shuffle(tables)
    for table in tables:
        table.release()
    assert books.num_free == 200
