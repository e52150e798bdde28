"""The pages of one sequence: position `p` is in place `p % 256` of its page `p // 256`."""

from dataclasses import dataclass

from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, pages_for


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Work for `PagePool.copy`: the first `num_tokens` places of page `src` go to page `dst`.

    It must be done before either page is written or `src` is released.
    """

    src: int
    dst: int
    num_tokens: int


class PageTable:
    """Pages held by a sequence, of which the first `length` tokens are committed."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._pages: tuple[int, ...] = ()
        self._length = 0

    @property
    def pages(self) -> tuple[int, ...]:
        """Page numbers in order of position, reserved ones included."""
        return self._pages

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._length

    def reserve(self, num_tokens: int) -> None:
        """Hold pages for `num_tokens` tokens after the committed ones.

        Raises `PagesExhausted`, and changes nothing, when the allocator has too few.
        """
        missing = pages_for(self._length + num_tokens) - len(self._pages)
        if missing > 0:
            self._pages += self._allocator.allocate(missing)

    def advance(self, num_tokens: int) -> None:
        """Commit `num_tokens` written tokens; raises `ValueError` beyond what is reserved."""
        length = self._length + num_tokens
        if num_tokens < 0 or length > len(self._pages) * PAGE_TOKENS:
            raise ValueError(f"{self._length} + {num_tokens} tokens in {len(self._pages)} pages")
        self._length = length

    def fork(self, length: int) -> tuple["PageTable", PageCopy | None]:
        """Return a table of the first `length` tokens, and the copy it needs before it is read.

        Whole pages are shared; a partial last page is a page of the fork's own. Raises
        `PagesExhausted` when that page cannot be had and `ValueError` for a length that is not
        committed.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"fork at {length} of {self._length} tokens")
        whole, partial = divmod(length, PAGE_TOKENS)
        own = self._allocator.allocate(1 if partial else 0)
        shared = self._pages[:whole]
        self._allocator.retain(shared)
        forked = PageTable(self._allocator)
        forked._pages = shared + own
        forked._length = length
        return forked, PageCopy(self._pages[whole], own[0], partial) if partial else None

    def release(self) -> None:
        """Give back every page; the table is empty afterwards."""
        self._allocator.release(self._pages)
        self._pages = ()
        self._length = 0
