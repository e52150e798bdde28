"""Tables and segments that are read back: what they share, what is to be filled, what goes back."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, PageForm, PagesExhausted
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.segments import ArchivedSegment, SegmentHit, SegmentMiss
from ragflash.kvcache.tree import SegmentTree

RULES, DOCUMENT, TURN = tuple(range(300)), tuple(range(1000, 2500)), tuple(range(3000, 3100))
SEGMENTS = (RULES, DOCUMENT, TURN)
GRID = Grid(512)
FORMS = {
    "exact": lambda num_pages: PageAllocators(PageAllocator(num_pages)),
    "grid": lambda num_pages: PageAllocators(
        PageAllocator(num_pages), PageAllocator(num_pages, PageForm.PACKED), GRID
    ),
}


@pytest.fixture(params=FORMS)
def make(request):
    return FORMS[request.param]


def begin(tree: SegmentTree, segments, num_new: int):
    found = [ArchivedSegment((at,), frozenset({"d"}), float(at)) for at in range(num_new)]
    return tree.begin_archived(segments, found, identity="m", namespace="a")


def find(tree: SegmentTree, *segments) -> SegmentHit | SegmentMiss:
    return tree.lookup(segments, identity="m", namespace="a")


@pytest.mark.parametrize("start", [0, 1, 255, 256, 257, 700, 1023, 1024, 1500])
@pytest.mark.parametrize("more", [0, 1, 255, 256, 600, 2000])
def test_an_extended_table_is_like_one_that_grew(make, start, more):
    allocators = make(64)
    before, grown = allocators.new_table().extended(start), allocators.new_table()
    extended = before.extended(start + more)
    left = start + more
    grown.reserve(left)
    while left:
        count = min(left, grown.room)
        grown.advance(count)
        left -= count
    assert extended.length == grown.length
    assert len(extended.packed_pages) == len(grown.packed_pages)
    num_own = start + more - len(extended.packed_pages) * PAGE_TOKENS
    assert len(extended.pages) == -(-num_own // PAGE_TOKENS)
    num_shared = len(set(before.packed_pages) & set(extended.packed_pages))
    assert num_shared == len(before.packed_pages)
    partial = before.pages[start // PAGE_TOKENS :] if allocators.grid is None else before.pages
    assert not set(partial) & set(extended.pages)
    fork, _ = extended.fork(start + more)
    for table in (before, extended, grown, fork):
        table.release()
    assert allocators.num_free == allocators.num_pages


def test_a_table_is_not_extended_backwards(make):
    table = make(8).new_table().extended(300)
    with pytest.raises(ValueError, match="300 tokens extended to 299"):
        table.extended(299)


def test_segments_appear_when_they_are_committed_and_can_each_be_continued(make):
    allocators = make(64)
    tree = SegmentTree(allocators)
    begun = begin(tree, SEGMENTS, 3)
    assert isinstance(find(tree, *SEGMENTS), SegmentMiss)
    for pending in begun:
        tree.commit(pending)
    for num_segments in (1, 2, 3):
        hit = find(tree, *SEGMENTS[:num_segments])
        assert (hit.num_segments, hit.reason) == (num_segments, None)
        assert hit.segment.end == sum(map(len, SEGMENTS[:num_segments]))
        assert hit.segment.state == (num_segments - 1,)
        opened = tree.open(hit)
        assert opened.table.length == hit.segment.end
        opened.table.release()
        tree.close(opened)
    assert tree.drop_source("d") == 3
    assert allocators.num_free == allocators.num_pages


def test_segments_follow_one_that_is_stored(make):
    tree = SegmentTree(make(64))
    for pending in begin(tree, SEGMENTS[:1], 1):
        tree.commit(pending)
    for pending in begin(tree, SEGMENTS, 2):
        tree.commit(pending)
    assert find(tree, *SEGMENTS).num_segments == 3
    with pytest.raises(ValueError, match="is not stored"):
        begin(tree, (TURN, RULES), 1)


@pytest.mark.parametrize("num_pages", [1, 2, 5, 9])
def test_without_enough_pages_nothing_is_taken(make, num_pages):
    allocators = make(num_pages)
    tree = SegmentTree(allocators)
    with pytest.raises(PagesExhausted):
        begin(tree, SEGMENTS, 3)
    assert allocators.num_free == allocators.num_pages
    assert len(tree) == 0


def test_what_is_abandoned_gives_its_pages_back(make):
    allocators = make(64)
    tree = SegmentTree(allocators)
    for pending in begin(tree, SEGMENTS, 3):
        tree.abandon(pending)
    assert allocators.num_free == allocators.num_pages
    for pending in begin(tree, SEGMENTS, 3):
        tree.commit(pending)
    assert find(tree, *SEGMENTS).num_segments == 3


def stored(tree: SegmentTree):
    (pending,) = begin(tree, SEGMENTS[:1], 1)
    tree.commit(pending)
    return pending.segment


def test_pages_that_are_held_outlast_their_segment(make):
    allocators, reading = make(64), Future()
    tree = SegmentTree(allocators)
    segment = stored(tree)
    tree.hold(segment, reading)
    tree.drop_all()
    assert allocators.num_free == allocators.num_pages - 2
    begin(tree, SEGMENTS[1:2], 1)
    assert all(allocators.exact.holders(page) for page in segment.pages)
    reading.set_result(None)
    tree.make_room(lambda: None)
    assert not any(allocators.exact.holders(page) for page in segment.pages)


def test_whoever_lacks_pages_waits_for_what_is_held(make):
    allocators, reading, asked = make(9), Future(), threading.Event()
    tree = SegmentTree(allocators)
    tree.hold(stored(tree), reading)

    def take():
        asked.set()
        return allocators.exact.allocate(9)

    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(tree.make_room, take)
        assert asked.wait(timeout=30)
        reading.set_exception(OSError("nothing was read"))
        assert len(taken.result(timeout=30)) == 9
    assert len(tree) == 0
    with pytest.raises(PagesExhausted):
        tree.make_room(lambda: allocators.exact.allocate(1))


def test_what_nothing_reads_any_more_is_not_held(make):
    allocators, reading = make(9), Future()
    reading.set_result(None)
    tree = SegmentTree(allocators)
    tree.hold(stored(tree), reading)
    tree.drop_all()
    assert allocators.num_free == allocators.num_pages
