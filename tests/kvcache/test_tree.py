"""Stored segments: what is found, what is never found, and who holds which page."""

import pytest

from ragflash.kvcache.allocator import PageAllocator, PagesExhausted
from ragflash.kvcache.grid import PageAllocators
from ragflash.kvcache.segments import (
    ROOT_KEY,
    MissReason,
    OpenSegment,
    SegmentHit,
    SegmentMiss,
    segment_key,
)
from ragflash.kvcache.table import PageCopy, PageTable
from ragflash.kvcache.tree import SegmentTree

RULES = tuple(range(300))
DOCUMENT = tuple(range(1000, 2500))
OTHER_DOCUMENT = (*range(1000, 1300), *range(5000, 6000))  # shares its first 300 tokens
TURN = tuple(range(3000, 3100))


class Store:
    """A tree and its allocator, with an engine's habits: compute, store each segment, release."""

    def __init__(self, num_pages: int = 64) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = SegmentTree(PageAllocators(self.allocator))

    def add(self, *segments, sources=frozenset(), identity="m", namespace="a", state=()) -> int:
        """Compute a prompt and store its segments; return how many were new."""
        table = PageTable(self.allocator)
        num_new = 0
        for end in range(1, len(segments) + 1):
            table.reserve(len(segments[end - 1]))
            table.advance(len(segments[end - 1]))
            last = end == len(segments)
            pending = self.tree.begin(
                segments[:end],
                identity=identity,
                namespace=namespace,
                table=table,
                state=state if last else (),
                source_ids=frozenset(sources) if last else frozenset(),
            )
            if pending is not None:
                self.tree.commit(pending)
                num_new += 1
        table.release()
        return num_new

    def find(self, *segments, identity="m", namespace="a") -> SegmentHit | SegmentMiss:
        return self.tree.lookup(segments, identity=identity, namespace=namespace)

    def finish(self, opened: OpenSegment) -> None:
        opened.table.release()
        self.tree.close(opened)

    @property
    def num_held(self) -> int:
        return self.allocator.num_pages - self.allocator.num_free


def test_finds_the_longest_run_of_whole_segments():
    store = Store()
    assert store.add(RULES, DOCUMENT, TURN) == 3
    hit = store.find(RULES, DOCUMENT, (7, 8, 9))
    assert isinstance(hit, SegmentHit)
    assert (hit.num_segments, hit.segment.end, hit.segment.num_tokens) == (2, 1800, 1500)
    assert hit.reason is MissReason.PREFIX_DIFFERS
    whole = store.find(RULES, DOCUMENT, TURN)
    assert isinstance(whole, SegmentHit)
    assert (whole.num_segments, whole.segment.end, whole.reason) == (3, 1900, None)


def test_says_why_nothing_is_found():
    store = Store()
    assert store.find(RULES) == SegmentMiss(MissReason.NONE_STORED)
    assert store.find() == SegmentMiss(MissReason.NONE_STORED)
    store.add(RULES)
    assert store.find((*RULES[:-1], 7)) == SegmentMiss(MissReason.PREFIX_DIFFERS)
    assert store.find(RULES[:-1]) == SegmentMiss(MissReason.PREFIX_DIFFERS)
    assert store.find(RULES, DOCUMENT) == SegmentHit(
        store.find(RULES).segment, 1, MissReason.NONE_STORED
    )
    assert store.tree.evict(64) == 2
    assert store.find(RULES) == SegmentMiss(MissReason.EVICTED)
    store.add(RULES)
    assert isinstance(store.find(RULES), SegmentHit)


def test_the_same_tokens_cut_otherwise_are_another_prompt():
    store = Store()
    store.add((1, 2, 3), (4, 5))
    for segments in [((1, 2), (3, 4, 5)), ((1, 2, 3, 4, 5),), ((4, 5),)]:
        assert isinstance(store.find(*segments), SegmentMiss)


def test_documents_with_a_common_start_are_never_mixed():
    store = Store()
    store.add(RULES, DOCUMENT, sources={"A"})
    store.add(RULES, OTHER_DOCUMENT, sources={"B"})
    for document, source in [(DOCUMENT, "A"), (OTHER_DOCUMENT, "B")] * 3:
        hit = store.find(RULES, document, TURN)
        assert isinstance(hit, SegmentHit)
        assert hit.segment.source_ids == {source}
        assert hit.segment.end == len(RULES) + len(document)


def test_namespaces_and_identities_share_nothing():
    store = Store()
    store.add(RULES, DOCUMENT, namespace="a", identity="m")
    assert store.find(RULES, namespace="b") == SegmentMiss(MissReason.NONE_STORED)
    assert store.find(RULES, identity="n") == SegmentMiss(MissReason.NONE_STORED)


def test_equal_hashes_are_not_enough(monkeypatch):
    monkeypatch.setattr("ragflash.kvcache.tree.segment_key", lambda *_: b"the same")
    store = Store()
    assert store.add((1, 2, 3)) == 1
    assert store.add((1, 2, 4)) == 0
    assert isinstance(store.find((1, 2, 4)), SegmentMiss)
    assert isinstance(store.find((1, 2, 3), namespace="b"), SegmentMiss)
    assert isinstance(store.find((1, 2, 3)), SegmentHit)


def test_keys_separate_their_parts():
    keys = {
        segment_key(ROOT_KEY, (1, 2), "m", "a"),
        segment_key(ROOT_KEY, (1, 2), "ma", ""),
        segment_key(ROOT_KEY, (1, 2), "", "ma"),
        segment_key(ROOT_KEY, (1, 2, 0), "m", "a"),
        segment_key(ROOT_KEY, (), "m", "a"),
        segment_key(b"m", (1, 2), "", "a"),
        segment_key(ROOT_KEY, (258,), "m", "a"),
    }
    assert len(keys) == 7
    assert segment_key(ROOT_KEY, [1, 2], "m", "a") in keys


def test_an_opened_segment_is_a_fork_with_a_page_of_its_own():
    store = Store()
    store.add(RULES, state=("snapshot",))
    hit = store.find(RULES)
    opened = store.tree.open(hit)
    assert opened.state == ("snapshot",)
    assert opened.table.length == 300
    assert opened.table.pages[0] == hit.segment.pages[0]
    assert opened.copies == (PageCopy(hit.segment.pages[1], opened.table.pages[1], 44),)
    store.finish(opened)
    assert store.num_held == 2


def test_a_later_segment_shares_the_pages_before_it():
    store = Store()
    store.add(RULES, DOCUMENT)
    rules, document = store.find(RULES).segment, store.find(RULES, DOCUMENT).segment
    assert document.pages[0] == rules.pages[0]
    assert document.pages[1] != rules.pages[1]
    assert document.parent == rules.key
    assert store.num_held == 8 + 1  # 1,800 tokens, and the partial page of the rules


def test_segments_in_use_and_those_before_others_are_not_evicted():
    store = Store()
    store.add(RULES, DOCUMENT)
    store.add(RULES, OTHER_DOCUMENT)
    opened = store.tree.open(store.find(RULES, DOCUMENT))
    assert store.tree.evict(64) == 7  # 1,600 tokens, computed apart
    assert isinstance(store.find(RULES, OTHER_DOCUMENT), SegmentHit)
    assert store.find(RULES, OTHER_DOCUMENT).num_segments == 1
    assert store.find(RULES, DOCUMENT).num_segments == 2
    store.finish(opened)
    store.tree.evict(64)
    assert len(store.tree) == 0
    assert store.num_held == 0


def test_evicts_the_longest_unused_first_and_no_more_than_needed():
    store = Store()
    for first in (0, 1000, 2000):
        store.add(tuple(range(first, first + 256)))
    store.find(tuple(range(256)))
    assert store.tree.evict(1) == 1
    assert isinstance(store.find(tuple(range(256))), SegmentHit)
    assert store.find(tuple(range(1000, 1256))) == SegmentMiss(MissReason.EVICTED)
    assert isinstance(store.find(tuple(range(2000, 2256))), SegmentHit)


def test_pages_of_a_running_sequence_survive_eviction_and_deletion():
    store = Store()
    store.add(RULES, sources={"A"})
    opened = store.tree.open(store.find(RULES))
    assert store.tree.drop_source("A") == 1
    assert all(store.allocator.holders(page) == 1 for page in opened.table.pages)
    store.add(RULES, sources={"A"})  # stored anew under the same key: not what was opened
    store.finish(opened)
    assert store.tree.evict(64) > 0
    assert store.num_held == 0


def test_deleting_a_source_takes_what_follows_it_and_nothing_else():
    store = Store()
    store.add(RULES, DOCUMENT, TURN)
    store.tree.drop_all()
    store.add(RULES)
    store.add(RULES, DOCUMENT, sources={"A", "B"})
    store.add(RULES, DOCUMENT, TURN)
    store.add(RULES, OTHER_DOCUMENT, sources={"C"})
    assert store.tree.drop_source("B") == 2
    assert store.find(RULES, DOCUMENT, TURN).num_segments == 1
    assert store.find(RULES, OTHER_DOCUMENT).num_segments == 2
    assert store.tree.drop_source("B") == 0
    assert store.tree.drop_all() == 2
    assert store.num_held == 0
    assert store.find(RULES) == SegmentMiss(MissReason.NONE_STORED)


def begin(store: Store, table: PageTable, *segments, sources=frozenset()):
    return store.tree.begin(
        segments, identity="m", namespace="a", table=table, state=(), source_ids=sources
    )


def computed(store: Store, length: int) -> PageTable:
    table = PageTable(store.allocator)
    table.reserve(length)
    table.advance(length)
    return table


def test_a_pending_segment_is_not_found_until_committed():
    store = Store()
    table = computed(store, 300)
    pending = begin(store, table, RULES)
    assert isinstance(store.find(RULES), SegmentMiss)
    assert begin(store, table, RULES) is None
    store.tree.commit(pending)
    assert isinstance(store.find(RULES), SegmentHit)
    assert begin(store, table, RULES) is None


def test_an_abandoned_segment_gives_everything_back():
    store = Store()
    table = computed(store, 300)
    store.tree.abandon(begin(store, table, RULES))
    table.release()
    assert store.num_held == 0
    assert store.find(RULES) == SegmentMiss(MissReason.NONE_STORED)


def test_a_source_deleted_before_the_commit_is_not_stored():
    store = Store()
    table = computed(store, 300)
    pending = begin(store, table, RULES, sources=frozenset({"A"}))
    assert store.tree.drop_source("A") == 1
    store.tree.commit(pending)
    table.release()
    assert len(store.tree) == 0
    assert store.num_held == 0


def test_a_segment_without_the_one_before_it_is_not_stored():
    store = Store()
    table = computed(store, 1800)
    assert begin(store, table, RULES, DOCUMENT) is None
    table.release()
    assert store.num_held == 0


def test_makes_room_for_a_copy_by_evicting_others():
    store = Store(num_pages=4)
    store.add((1, 2, 3))
    store.add((4, 5, 6))
    held = store.allocator.allocate(2)
    opened = store.tree.open(store.find((4, 5, 6)))
    assert store.find((1, 2, 3)) == SegmentMiss(MissReason.EVICTED)
    with pytest.raises(PagesExhausted):
        store.tree.open(store.find((4, 5, 6)))
    with pytest.raises(PagesExhausted):
        begin(store, opened.table, (4, 5))
    store.finish(opened)
    store.allocator.release(held)
    assert store.tree.evict(4) == 1
    assert store.num_held == 0


def test_refuses_stale_hits_and_double_closing():
    store = Store()
    store.add(RULES)
    hit = store.find(RULES)
    opened = store.tree.open(hit)
    store.finish(opened)
    with pytest.raises(ValueError, match="closed more often"):
        store.tree.close(opened)
    store.tree.drop_all()
    with pytest.raises(ValueError, match="not stored any more"):
        store.tree.open(hit)
