"""The pages of one sequence: position `p` is in place `p % 256` of its page `p // 256`."""

from dataclasses import dataclass
from typing import Protocol

from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, PageForm, pages_for


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Work for `PagePool.copy`: the first `num_tokens` places of page `src` go to page `dst`.

    It must be done before either page is written or `src` is released.
    """

    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PageConversion:
    """Work for `PackedPool.encode`: packed page `packed` becomes what exact page `exact` holds.

    It must be done before either page is written or `exact` is released.
    """

    exact: int
    packed: int


class KVTable(Protocol):
    """Pages held by a sequence or a stored segment, whatever the forms."""

    @property
    def pages(self) -> tuple[int, ...]:
        """Exact pages in order of position, reserved ones last."""

    @property
    def packed_pages(self) -> tuple[int, ...]:
        """Packed pages in order of position; they hold the tokens after the first exact page."""

    @property
    def length(self) -> int:
        """Committed tokens."""

    @property
    def room(self) -> int:
        """Most rows that a forward may compute now."""

    def holds(self, form: PageForm) -> bool:
        """Whether releasing it gives pages of a form back, if nobody shares them."""

    def reserve(self, num_tokens: int) -> None:
        """Hold all pages that `num_tokens` more committed tokens will ever need.

        Raises `PagesExhausted`, and changes nothing, when an allocator has too few.
        """

    def advance(self, num_tokens: int) -> tuple[PageConversion, ...]:
        """Commit written tokens; return what must be done before the next forward.

        Raises `ValueError` beyond `room`.
        """

    def fork(self, length: int) -> tuple["KVTable", tuple[PageCopy, ...]]:
        """Return a table of the first `length` tokens, and the copies it needs before it is read.

        Raises `PagesExhausted` when pages for the copies cannot be had, and `ValueError` for a
        length that is not committed or whose pages are not exact any more.
        """

    def extended(self, length: int) -> "KVTable":
        """Return a table of `length` tokens whose pages the caller fills but for those it shares.

        It shares with this one what no longer changes after these tokens. Raises
        `PagesExhausted`, and `ValueError` for a length below this one's.
        """

    def release(self) -> None:
        """Give back every page; the table is empty afterwards."""


class PageTable(KVTable):
    """A table all of whose pages are exact, and shared with its forks where they are whole."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._pages: tuple[int, ...] = ()
        self._length = 0

    @property
    def pages(self) -> tuple[int, ...]:
        """See `KVTable`."""
        return self._pages

    @property
    def packed_pages(self) -> tuple[int, ...]:
        """See `KVTable`: none."""
        return ()

    @property
    def length(self) -> int:
        """See `KVTable`."""
        return self._length

    @property
    def room(self) -> int:
        """See `KVTable`: what is reserved."""
        return len(self._pages) * PAGE_TOKENS - self._length

    def holds(self, form: PageForm) -> bool:
        """See `KVTable`."""
        return form is PageForm.EXACT and bool(self._pages)

    def reserve(self, num_tokens: int) -> None:
        """See `KVTable`."""
        missing = pages_for(self._length + num_tokens) - len(self._pages)
        if missing > 0:
            self._pages += self._allocator.allocate(missing)

    def advance(self, num_tokens: int) -> tuple[PageConversion, ...]:
        """See `KVTable`; there is nothing to convert."""
        if not 0 <= num_tokens <= self.room:
            raise ValueError(f"{self._length} + {num_tokens} tokens in {len(self._pages)} pages")
        self._length += num_tokens
        return ()

    def fork(self, length: int) -> tuple["PageTable", tuple[PageCopy, ...]]:
        """See `KVTable`; a partial last page is a page of the fork's own."""
        if not 0 <= length <= self._length:
            raise ValueError(f"fork at {length} of {self._length} tokens")
        whole, partial = divmod(length, PAGE_TOKENS)
        own = self._allocator.allocate(1 if partial else 0)
        shared = self._pages[:whole]
        self._allocator.retain(shared)
        forked = PageTable(self._allocator)
        forked._pages = shared + own
        forked._length = length
        return forked, (PageCopy(self._pages[whole], own[0], partial),) if partial else ()

    def extended(self, length: int) -> "PageTable":
        """See `KVTable`: whole pages are shared."""
        if length < self._length:
            raise ValueError(f"{self._length} tokens extended to {length}")
        shared = self._pages[: self._length // PAGE_TOKENS]
        own = self._allocator.allocate(pages_for(length) - len(shared))
        self._allocator.retain(shared)
        extended = PageTable(self._allocator)
        extended._pages, extended._length = shared + own, length
        return extended

    def release(self) -> None:
        """See `KVTable`."""
        self._allocator.release(self._pages)
        self._pages = ()
        self._length = 0
