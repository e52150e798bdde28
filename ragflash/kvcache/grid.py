"""Two forms of a sequence's pages: the newest as they were computed, older ones packed.

Positions alone decide which form a row reads. They are cut into blocks of a grid; a row in block b
reads the first page of the sequence and the pages of blocks b - 1 and b as exact numbers, and all
pages between them packed. So prefill, decoding, the verification of drafts and a restored sequence
read the same numbers, and what was drafted is never packed.
"""

from dataclasses import dataclass

from ragflash.kvcache.allocator import (
    PAGE_TOKENS,
    PageAllocator,
    PageForm,
    PagesExhausted,
    pages_for,
)
from ragflash.kvcache.table import KVTable, PageConversion, PageCopy, PageTable


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks of `tokens` positions, whole pages each; raises `ValueError` for another number."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < PAGE_TOKENS or self.tokens % PAGE_TOKENS:
            raise ValueError(f"a grid of {self.tokens} tokens is not of pages of {PAGE_TOKENS}")

    @property
    def most_exact_pages(self) -> int:
        """Exact pages of a long sequence: the first, and two blocks."""
        return 1 + 2 * self.tokens // PAGE_TOKENS

    def num_packed(self, position: int) -> int:
        """Return how many pages a row at `position` reads packed, the sequence's second first."""
        block = position // self.tokens
        return max(0, (block - 1) * (self.tokens // PAGE_TOKENS) - 1)

    def rows_left(self, position: int) -> int:
        """Return how many rows from `position` on are in its block."""
        return self.tokens - position % self.tokens


class GridTable(KVTable):
    """A table of both forms: packed pages are shared with forks, exact ones are its own.

    The pages of a block are packed as soon as nothing can read them as they are, and are then used
    for the tokens to come.
    """

    def __init__(self, grid: Grid, exact: PageAllocator, packed: PageAllocator) -> None:
        self._grid = grid
        self._exact = exact
        self._packed = packed
        self._pages: tuple[int, ...] = ()
        self._packed_pages: tuple[int, ...] = ()  # reserved ones included
        self._length = 0
        self._reserved = 0  # tokens that pages are held for

    @property
    def pages(self) -> tuple[int, ...]:
        """See `KVTable`: page 0, then the pages after the packed ones."""
        return self._pages

    @property
    def packed_pages(self) -> tuple[int, ...]:
        """See `KVTable`."""
        return self._packed_pages[: self._grid.num_packed(self._length)]

    @property
    def length(self) -> int:
        """See `KVTable`."""
        return self._length

    @property
    def room(self) -> int:
        """See `KVTable`: what is reserved of the block."""
        return min(self._reserved - self._length, self._grid.rows_left(self._length))

    def holds(self, form: PageForm) -> bool:
        """See `KVTable`."""
        return bool(self._pages if form is PageForm.EXACT else self._packed_pages)

    def reserve(self, num_tokens: int) -> None:
        """See `KVTable`."""
        end = max(self._length + num_tokens, self._reserved)
        num_exact = pages_for(end) - len(self.packed_pages)
        num_exact = min(num_exact, self._grid.most_exact_pages) - len(self._pages)
        num_packed = self._grid.num_packed(end) - len(self._packed_pages)
        exact, packed = self._allocate(max(0, num_exact), max(0, num_packed))
        self._pages += exact
        self._packed_pages += packed
        self._reserved = end

    def advance(self, num_tokens: int) -> tuple[PageConversion, ...]:
        """See `KVTable`."""
        if not 0 <= num_tokens <= self.room:
            raise ValueError(f"{num_tokens} tokens after {self._length}, of {self.room} at most")
        before = len(self.packed_pages)
        self._length += num_tokens
        new = self.packed_pages[before:]
        first, old, newest = self._pages[:1], self._pages[1 : 1 + len(new)], self._pages[1:]
        self._pages = first + newest[len(new) :] + old
        return tuple(map(PageConversion, old, new))

    def fork(self, length: int) -> tuple["GridTable", tuple[PageCopy, ...]]:
        """See `KVTable`; the fork has copies of all exact pages."""
        shared = self.packed_pages
        if not 0 <= length <= self._length or self._grid.num_packed(length) != len(shared):
            raise ValueError(
                f"fork at {length} of {self._length} tokens, {len(shared)} pages of them packed"
            )
        num_tokens = length - len(shared) * PAGE_TOKENS
        own, _ = self._allocate(pages_for(num_tokens), 0)
        self._packed.retain(shared)
        forked = GridTable(self._grid, self._exact, self._packed)
        forked._pages, forked._packed_pages = own, shared
        forked._length = forked._reserved = length
        copies = (
            PageCopy(src, dst, min(PAGE_TOKENS, num_tokens - index * PAGE_TOKENS))
            for index, (src, dst) in enumerate(zip(self._pages, own, strict=False))
        )
        return forked, tuple(copies)

    def extended(self, length: int) -> "GridTable":
        """See `KVTable`: packed pages are shared."""
        if length < self._length:
            raise ValueError(f"{self._length} tokens extended to {length}")
        shared, num_packed = self.packed_pages, self._grid.num_packed(length)
        num_exact = pages_for(length - num_packed * PAGE_TOKENS)
        exact, packed = self._allocate(num_exact, num_packed - len(shared))
        self._packed.retain(shared)
        extended = GridTable(self._grid, self._exact, self._packed)
        extended._pages, extended._packed_pages = exact, shared + packed
        extended._length = extended._reserved = length
        return extended

    def release(self) -> None:
        """See `KVTable`."""
        self._exact.release(self._pages)
        self._packed.release(self._packed_pages)
        self._pages = self._packed_pages = ()
        self._length = self._reserved = 0

    def _allocate(self, num_exact: int, num_packed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Take pages of both forms, or none."""
        exact = self._exact.allocate(num_exact)
        try:
            return exact, self._packed.allocate(num_packed)
        except PagesExhausted:
            self._exact.release(exact)
            raise


@dataclass(frozen=True, slots=True)
class PageAllocators:
    """All pages that tables are made of.

    Attributes:
        exact: Exact pages.
        packed: Packed pages; `None` when all pages are exact.
        grid: Decides between the two.
    """

    exact: PageAllocator
    packed: PageAllocator | None = None
    grid: Grid | None = None

    @property
    def num_pages(self) -> int:
        """Pages of both forms, free or held."""
        return sum(allocator.num_pages for allocator in self._all())

    @property
    def num_free(self) -> int:
        """Pages of both forms that nobody holds."""
        return sum(allocator.num_free for allocator in self._all())

    @property
    def most_tokens(self) -> int:
        """Longest sequence that fits while nothing else is held."""
        exact_tokens = self.exact.num_pages * PAGE_TOKENS
        if self.packed is None or self.grid is None:
            return exact_tokens
        blocks = (self.packed.num_pages + 1) * PAGE_TOKENS // self.grid.tokens + 2
        packed_tokens = blocks * self.grid.tokens - 1
        if self.exact.num_pages < self.grid.most_exact_pages:
            return min(exact_tokens, packed_tokens)
        return packed_tokens

    def of(self, form: PageForm) -> PageAllocator:
        """Return the allocator of a form; raises `ValueError` when there is none."""
        for allocator in self._all():
            if allocator.form is form:
                return allocator
        raise ValueError(f"there are no {form} pages")

    def new_table(self) -> KVTable:
        """Return an empty table."""
        if self.packed is None or self.grid is None:
            return PageTable(self.exact)
        return GridTable(self.grid, self.exact, self.packed)

    def _all(self) -> tuple[PageAllocator, ...]:
        return (self.exact,) if self.packed is None else (self.exact, self.packed)
