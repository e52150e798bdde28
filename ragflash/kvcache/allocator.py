"""Page numbers and who holds them; knows nothing of what a page stores."""

import heapq
from collections.abc import Iterable
from enum import StrEnum

PAGE_TOKENS = 256


class PageForm(StrEnum):
    """How a page stores its tokens."""

    EXACT = "exact"  # as they were computed
    PACKED = "packed"  # in fewer bits


class PagesExhausted(Exception):
    """Fewer pages of a form are free than were asked for; nothing was taken."""

    def __init__(self, wanted: int, free: int, form: PageForm = PageForm.EXACT) -> None:
        super().__init__(f"{wanted} {form} pages wanted, {free} free")
        self.wanted = wanted
        self.free = free
        self.form = form


def pages_for(num_tokens: int) -> int:
    """Return how many pages hold `num_tokens` tokens that start at a page's first place."""
    return -(-num_tokens // PAGE_TOKENS)


class PageAllocator:
    """Hands out page numbers `0 … num_pages - 1` and counts their holders.

    The lowest free numbers go first, so that the pages of a sequence tend to lie one after the
    other, which attention on a CPU reads fastest.
    """

    def __init__(self, num_pages: int, form: PageForm = PageForm.EXACT) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages = {num_pages} is below 1")
        self.form = form
        self._holders = [0] * num_pages
        self._free = list(range(num_pages))

    @property
    def num_pages(self) -> int:
        """All pages, free or held."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """Return how often `page` is held."""
        return self._holders[page]

    def allocate(self, n: int) -> tuple[int, ...]:
        """Take `n` free pages, each held once; `PagesExhausted` takes none when fewer are free."""
        if n > len(self._free):
            raise PagesExhausted(n, len(self._free), self.form)
        pages = tuple(heapq.heappop(self._free) for _ in range(n))
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Hold each page once more; raises `ValueError` for a free page."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold each page once less, the last time frees it; raises `ValueError` for a free page."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is released more often than it was held")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                heapq.heappush(self._free, page)
