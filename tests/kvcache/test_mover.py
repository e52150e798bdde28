"""Bytes reach their pages and come back, through less memory than they have, however late."""

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.kvcache.allocator import PAGE_TOKENS, PageForm
from ragflash.kvcache.archive import Landing
from ragflash.kvcache.mover import DeviceMover, HostMover, PageImage, landing_in, mover_of
from ragflash.kvcache.pages import KVLayout, KVPages, LayerKV, PackedPool, PagePool
from ragflash.kvcache.planner import pinned_bytes
from tests.kvcache.late_copies import LateCopies

LAYOUT = KVLayout((LayerKV(2, 32), LayerKV(1, 64)), torch.float32)
NUM_PAGES = 5
PIECE_BYTES = 100_000  # an exact page is three pieces, a packed one is one


def make_pages() -> KVPages:
    return KVPages(PagePool(LAYOUT, NUM_PAGES), PackedPool(LAYOUT, "q8_0", NUM_PAGES))


STATE = (torch.empty(3, 5), torch.empty(2, 7, dtype=torch.float16))


def make_mover(pages: KVPages, copies: LateCopies, num_slots: int = 3) -> DeviceMover:
    return DeviceMover(pages, STATE, copies, num_slots=num_slots, slot_bytes=PIECE_BYTES)


MOVERS = {
    "host": lambda pages: HostMover(pages, STATE),
    "device": lambda pages: make_mover(pages, LateCopies()),
}


def content(at: int, num_bytes: int) -> bytes:
    return random.Random(at).randbytes(num_bytes)


def cut(landing: Landing) -> list[slice]:
    size, end = PIECE_BYTES, landing.num_bytes
    return [slice(start, min(start + size, end)) for start in range(0, end, size)]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


class Damaged(Exception):
    """What a reader raises for a piece."""


def fill(landing: Landing, at: slice, data: bytes) -> None:
    with landing.piece(at) as memory:
        memory[:] = data[at]


PLACES = [(form, page) for form in PageForm for page in range(NUM_PAGES)]


@given(
    places=st.permutations(PLACES),
    num_filled=st.integers(0, len(PLACES)),
    damaged=st.sets(st.integers(0, 30)),
    num_slots=st.integers(1, 4),
    num_readers=st.integers(1, 3),
    shuffle=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_every_piece_that_counts_is_in_its_place_and_no_other_is(
    places, num_filled, damaged, num_slots, num_readers, shuffle
):
    """Readers fill pieces in any order; some are damaged, and some are never read."""
    pages, copies = make_pages(), LateCopies()
    for form, page in PLACES:
        pages.page(form, page).zero_()
    mover = make_mover(pages, copies, num_slots)
    landings = {place: mover.landing(*place) for place in places[:num_filled]}
    work = [(place, at) for place, landing in landings.items() for at in cut(landing)]
    shuffle.shuffle(work)
    expected = {place: bytearray(landing.num_bytes) for place, landing in landings.items()}

    def read(number: int) -> None:
        place, at = work[number]
        data = content(PLACES.index(place), landings[place].num_bytes)
        if number in damaged:
            with pytest.raises(Damaged), landings[place].piece(at) as memory:
                memory[:] = bytes(memory.nbytes)
                raise Damaged
            return
        fill(landings[place], at, data)
        expected[place][at] = data[at]

    with mover.filling(), ThreadPoolExecutor(num_readers) as readers:
        list(readers.map(read, range(len(work))))
    assert copies.num_done == sum(number not in damaged for number in range(len(work)))
    assert copies.most_pending <= num_slots
    for form, page in PLACES:
        place = (form, page)
        wanted = expected.get(place, bytearray(mover.page_bytes(form)))
        assert bytes_of(pages.page(form, page)) == wanted
    mover.close()


def fill_all(pages: KVPages, places: Iterable[tuple[PageForm, int]]) -> None:
    for form, page in places:
        values = pages.page(form, page).reshape(-1).view(torch.uint8)
        data = content(PLACES.index((form, page)), values.nbytes)
        values.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@given(places=st.lists(st.sampled_from(PLACES), unique=True), num_slots=st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_pages_are_fetched_in_the_order_that_was_asked_for(places, num_slots):
    pages, copies = make_pages(), LateCopies()
    fill_all(pages, PLACES)
    mover = make_mover(pages, copies, num_slots)
    state = (torch.arange(30).view(5, 6), torch.ones(3))
    images = [PageImage(form, page, PAGE_TOKENS) for form, page in places]
    buffers = mover.fetch(images, state).result(timeout=30)
    mover.close()
    wanted = [bytes_of(pages.page(form, page)) for form, page in places]
    assert [bytes(buffer) for buffer in buffers] == [*wanted, *map(bytes_of, state)]


def test_pages_may_be_read_while_others_are_fetched():
    """Both directions share the ring; a fetch has one slot at a time."""
    pages, copies = make_pages(), LateCopies()
    fill_all(pages, PLACES[:4])
    mover = make_mover(pages, copies, num_slots=2)
    fetched = mover.fetch([PageImage(*place, PAGE_TOKENS) for place in PLACES[:4]], ())
    with mover.filling():
        landing = mover.landing(*PLACES[4])
        for at in cut(landing):
            fill(landing, at, content(4, landing.num_bytes))
    assert [bytes(buffer) for buffer in fetched.result(timeout=30)] == [
        content(at, landing.num_bytes) for at in range(4)
    ]
    assert bytes_of(pages.page(*PLACES[4])) == content(4, landing.num_bytes)
    mover.close()


@pytest.mark.parametrize("name", MOVERS)
def test_a_copy_has_nothing_of_what_a_page_held_before(name):
    pages = make_pages()
    mover = MOVERS[name](pages)
    pages.exact.page(1).fill_(7.0)
    for num_tokens in (1, 200, 256):
        image = PageImage(PageForm.EXACT, 1, num_tokens)
        (buffer,) = mover.fetch([image], ()).result(timeout=30)
        found = torch.frombuffer(buffer, dtype=torch.float32)
        share = num_tokens / PAGE_TOKENS
        assert int((found == 7.0).sum()) == share * LAYOUT.page_values
        assert int((found == 0.0).sum()) == (1 - share) * LAYOUT.page_values
        pool = PagePool(LAYOUT, 1)
        pool.page(0).copy_(found)
        for layer in range(2):
            assert bool((pool.keys(layer)[0, :, :num_tokens] == 7.0).all())
            assert bool((pool.values(layer)[0, :, num_tokens:] == 0.0).all())
    assert bool((pages.exact.page(1) == 7.0).all())
    mover.close()


@pytest.mark.parametrize("name", MOVERS)
def test_a_state_lands_in_memory_of_its_own(name):
    mover = MOVERS[name](make_pages())
    states = [mover.new_state() for _ in range(4)]
    for at, state in enumerate(states):
        for tensor in state:
            landing = landing_in(tensor)
            fill(landing, slice(0, landing.num_bytes), content(at, landing.num_bytes))
    for at, state in enumerate(states):
        assert [(one.shape, one.dtype) for one in state] == [
            (one.shape, one.dtype) for one in STATE
        ]
        assert [bytes_of(one) for one in state] == [content(at, one.nbytes) for one in state]
    mover.close()


def test_what_is_pinned_is_what_the_plan_says():
    shape = SimpleNamespace(state_bytes=sum(tensor.nbytes for tensor in STATE))
    pinned = []

    class Counted(LateCopies):
        def pinned(self, *shape: int) -> torch.Tensor:
            memory = super().pinned(*shape)
            pinned.append(memory.nbytes)
            return memory

    DeviceMover(make_pages(), STATE, Counted()).close()
    assert sum(pinned) == pinned_bytes(shape)


def test_pages_of_the_host_are_read_in_place():
    pages = make_pages()
    mover = mover_of(pages, STATE)
    assert isinstance(mover, HostMover)
    landing = mover.landing(PageForm.PACKED, 2)
    with mover.filling():
        fill(landing, slice(0, landing.num_bytes), content(1, landing.num_bytes))
        assert bytes_of(pages.page(PageForm.PACKED, 2)) == content(1, landing.num_bytes)
