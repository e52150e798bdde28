"""What files may take: reserved before writing, made by eviction, counted from the disk."""

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash.kvcache.segments import ROOT_KEY
from ragflash.sessions import (
    FileMiss,
    FileMissReason,
    RefusalReason,
    Refused,
    SessionLimits,
    SnapshotItem,
)
from ragflash.sessions.disk import Disk
from ragflash.sessions.eviction import Entry, plan_eviction, worth
from ragflash.sessions.index import SegmentRow
from ragflash.sessions.records import PrefixKeys
from tests.sessions.samples import (
    DOCUMENT,
    ITEMS,
    LIMITS,
    RULES,
    TURN,
    bytes_of,
    files_of,
    find,
    is_stored,
    open_folder,
    record_of,
    store,
)

DAY_S = 86_400


def size_of_one(path) -> int:
    folder = open_folder(path)
    store(folder, RULES)
    (info,) = folder.list()
    folder.delete(info.id)
    folder.close()
    return info.size_bytes


def tokens(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + len(RULES)))


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""

    class Clock:
        now = math.floor(time.time() / DAY_S) * DAY_S + 3600.0

    monkeypatch.setattr(time, "time", lambda: Clock.now)
    return Clock


class FullDisk(Disk):
    """A disk with so much room, all of it for sessions."""

    def __init__(self, path, free: int) -> None:
        self.path, self.room = path, free

    def free_bytes(self, path):
        return self.room - sum(file.stat().st_size for file in files_of(self.path))


@pytest.mark.parametrize("by_quota", [True, False])
def test_the_least_worthy_go_and_files_never_take_more(path, by_quota, clock):
    size = size_of_one(path)
    if by_quota:
        limits, disk = SessionLimits(quota_bytes=3 * size, min_free_bytes=0), None
    else:
        limits = SessionLimits(quota_bytes=1 << 40, min_free_bytes=1000)
        disk = FullDisk(path, 3 * size + 1000)
    folder = open_folder(path, limits, disk=disk)
    for number, seconds in enumerate((5.0, 1.0, 9.0, 2.0, 3.0)):
        assert store(folder, tokens(number), seconds=seconds) is None
        assert sum(file.stat().st_size for file in files_of(path)) <= 3 * size
    stored = [number for number in range(5) if is_stored(folder, tokens(number))]
    assert stored == [0, 2, 4]
    assert find(folder, tokens(1)) == FileMiss(FileMissReason.EVICTED)
    folder.close()
    folder = open_folder(path, limits, disk=disk)
    assert find(folder, tokens(3)) == FileMiss(FileMissReason.EVICTED)
    assert store(folder, tokens(3), seconds=2.0) is None
    assert is_stored(folder, tokens(3))
    folder.close()


def test_a_collection_makes_room_of_its_own(path, clock):
    """Its quota is kept at the cost of its own files, however worthless those of others are."""
    size = size_of_one(path)
    folder = open_folder(path, replace(LIMITS, collection_quota_bytes=2 * size))
    assert store(folder, tokens(0), seconds=0.1, namespace="other") is None
    for number, seconds in enumerate((5.0, 1.0, 9.0)):
        assert store(folder, tokens(number), seconds=seconds) is None
    assert [number for number in range(3) if is_stored(folder, tokens(number))] == [0, 2]
    assert is_stored(folder, tokens(0), namespace="other")
    assert folder.counts().largest_collection_bytes == 2 * size
    folder.close()


def test_what_does_not_fit_a_collection_is_refused_by_name(path):
    size = size_of_one(path)
    folder = open_folder(path, replace(LIMITS, collection_quota_bytes=2 * size - 1))
    assert store(folder, tokens(0)) is None
    (info,) = folder.list()
    folder.pin(info.id)
    assert store(folder, tokens(1)) == Refused(RefusalReason.COLLECTION_QUOTA)
    assert is_stored(folder, tokens(0))
    assert store(folder, tokens(1), namespace="other") is None
    folder.close()


def test_others_files_go_only_when_a_collection_has_none_left(path):
    size = size_of_one(path)
    folder = open_folder(path, replace(LIMITS, quota_bytes=3 * size))
    store(folder, tokens(0), seconds=0.1, namespace="other")
    store(folder, tokens(0), seconds=9.0)
    store(folder, tokens(1), seconds=8.0)
    assert store(folder, tokens(2), seconds=7.0) is None
    assert is_stored(folder, tokens(0), namespace="other")
    assert not is_stored(folder, tokens(1))
    assert store(folder, tokens(0), namespace="third") is None
    assert not is_stored(folder, tokens(0), namespace="other")
    folder.close()


def test_a_smaller_collection_quota_is_kept_by_gc(path):
    size = size_of_one(path)
    folder = open_folder(path)
    for number in range(3):
        store(folder, tokens(number), seconds=1.0 + number)
        store(folder, tokens(number), namespace="other")
    folder.close()
    folder = open_folder(path, replace(LIMITS, collection_quota_bytes=size))
    counts = folder.gc()
    assert (counts.num_segments, counts.largest_collection_bytes) == (2, size)
    assert is_stored(folder, tokens(2))
    folder.close()


def test_what_was_used_lately_stays_and_others_go(path, clock):
    limits = replace(LIMITS, quota_bytes=2 * size_of_one(path))
    folder = open_folder(path, limits)
    store(folder, tokens(1))
    clock.now += 10
    store(folder, tokens(2))
    clock.now += 3 * 3600
    assert is_stored(folder, tokens(1))
    folder.close()
    folder = open_folder(path, limits)
    store(folder, tokens(3))
    assert is_stored(folder, tokens(1))
    assert not is_stored(folder, tokens(2))
    folder.close()


def test_the_beginning_of_a_chain_and_what_is_pinned_stay(path):
    size = size_of_one(path)
    folder = open_folder(path, replace(LIMITS, quota_bytes=3 * size))
    store(folder, RULES, seconds=0.1)
    store(folder, RULES, DOCUMENT, seconds=9.0)
    store(folder, TURN, seconds=1.0)
    pinned = next(info for info in folder.list() if info.num_tokens == len(TURN))
    folder.pin(pinned.id)
    assert store(folder, tokens(3)) is None  # only the document may go, then its rules
    assert is_stored(folder, RULES)
    assert is_stored(folder, TURN)
    assert store(folder, RULES, DOCUMENT, seconds=9.0) is None  # its rules are needed meanwhile
    assert is_stored(folder, RULES, DOCUMENT)
    folder.pin(next(info.id for info in folder.list() if info.num_tokens == len(DOCUMENT)))
    drawn = []
    record = record_of(tokens(4))
    assert folder.store(record, map(drawn.append, [b""])) == Refused(RefusalReason.QUOTA)
    assert drawn == []  # room comes before bytes
    folder.unpin(pinned.id)
    assert store(folder, tokens(4)) is None
    folder.close()


def test_what_does_not_fit_evicts_nothing(path):
    folder = open_folder(path, replace(LIMITS, quota_bytes=2 * size_of_one(path)))
    store(folder, RULES)
    big = [SnapshotItem(40, 0, 1 << 20)]
    assert store(folder, TURN, items=big) == Refused(RefusalReason.QUOTA)
    assert is_stored(folder, RULES)
    folder.close()


def test_a_smaller_quota_is_kept_at_the_next_gc(path):
    size = size_of_one(path)
    folder = open_folder(path)
    for number in range(4):
        store(folder, tokens(number))
    folder.close()
    folder = open_folder(path, replace(LIMITS, quota_bytes=2 * size))
    assert folder.counts().num_segments == 4
    counts = folder.gc()
    assert (counts.num_segments, counts.size_bytes) == (2, 2 * size)
    folder.close()


def test_counts_are_those_of_the_disk_whatever_happened_to_it(path):
    folder = open_folder(path)
    for number in range(3):
        store(folder, tokens(number))
    files_of(path)[0].unlink()
    assert folder.counts().num_segments == 3
    counts = folder.recount()
    assert counts.num_segments == 2
    assert counts.size_bytes == sum(file.stat().st_size for file in files_of(path))
    files_of(path)[0].unlink()
    stored = [number for number in range(3) if is_stored(folder, tokens(number))]
    assert len(stored) == 1
    for number in {0, 1, 2} - set(stored):
        assert store(folder, tokens(number)) is None
        assert is_stored(folder, tokens(number))
    folder.close()


def test_set_aside_files_count_and_go_first(path):
    size = size_of_one(path)
    folder = open_folder(path, replace(LIMITS, quota_bytes=2 * size))
    store(folder, RULES, seconds=0.1)
    store(folder, TURN)
    damaged = next(f for f in files_of(path) if f.stem == folder.list()[0].id)
    damaged.write_bytes(bytes(size))
    folder.verify()
    assert folder.counts().size_bytes == 2 * size
    assert store(folder, DOCUMENT, items=ITEMS[:1]) is None
    assert list((path / "quarantine").iterdir()) == []
    assert is_stored(folder, RULES)
    folder.close()


def test_the_write_budget_is_of_a_day_and_outlives_the_process(path, clock):
    size = size_of_one(path)
    clock.now += DAY_S
    limits = replace(LIMITS, daily_write_bytes=2 * size)
    folder = open_folder(path, limits)
    assert store(folder, tokens(0)) is None
    assert store(folder, tokens(1)) is None
    folder.delete(folder.list()[0].id)
    assert store(folder, tokens(2)) == Refused(RefusalReason.WRITE_BUDGET)
    folder.close()
    folder = open_folder(path, limits)
    assert store(folder, tokens(2)) == Refused(RefusalReason.WRITE_BUDGET)
    clock.now += DAY_S
    assert store(folder, tokens(2)) is None
    assert folder.counts().written_today_bytes == size
    folder.close()


def test_what_was_computed_quickly_is_not_stored(path):
    folder = open_folder(path, replace(LIMITS, min_prefill_seconds=2.0))
    assert store(folder, RULES, seconds=1.9) == Refused(RefusalReason.NOT_WORTH_IT)
    assert store(folder, RULES, seconds=2.0) is None
    folder.close()


def row(key: bytes, parent: bytes, seconds: float, size: int, name: str = "") -> SegmentRow:
    return SegmentRow(PrefixKeys(key, parent, key), name, (), {}, 1, 1, size, 0, seconds, 0.0)


@st.composite
def forests(draw) -> dict[bytes, Entry]:
    """Entries whose parents are earlier ones, nothing, or lost."""
    entries: dict[bytes, Entry] = {}
    for number in range(draw(st.integers(0, 12))):
        key = bytes([number])
        parent = draw(st.sampled_from([ROOT_KEY, b"lost", *entries]))
        seconds, size = draw(st.floats(0.0, 100.0)), draw(st.integers(1, 1000))
        used, pinned = draw(st.floats(0.0, 1e6)), draw(st.booleans())
        name = draw(st.sampled_from(["mine", "other"]))
        entries[key] = Entry(row(key, parent, seconds, size, name), used, pinned)
    return entries


def is_reachable(entries: dict[bytes, Entry], entry: Entry) -> bool:
    return entry.parent == ROOT_KEY or (
        entry.parent in entries and is_reachable(entries, entries[entry.parent])
    )


@given(entries=forests(), need=st.integers(0, 4000), data=st.data())
def test_eviction_takes_the_least_worthy_that_may_go_and_no_more_than_needed(entries, need, data):
    now = 1e6
    kept = data.draw(st.sets(st.sampled_from([*entries, b"other"])))
    first = data.draw(st.sampled_from([None, "mine", "other"]))
    victims = plan_eviction(entries, need, kept, now, first)
    left = dict(entries)
    for victim in victims or ():
        may_go = list_removable(left, kept)
        assert victim in may_go
        order = [rank(left, entry, first, now) for entry in may_go]
        assert rank(left, victim, first, now) == min(order)
        assert need > size_of(entries) - size_of(left)
        del left[victim.key]
    if victims is None:
        assert most_freed(entries, kept) < need
    else:
        assert size_of(entries) - size_of(left) >= need


def rank(entries, entry: Entry, first: str | None, now: float) -> tuple[bool, bool, float]:
    """What of several entries goes first, in a word."""
    if not is_reachable(entries, entry):
        return (False, False, 0.0)
    return (True, first is not None and entry.row.namespace != first, worth(entry, now))


def most_freed(entries: dict[bytes, Entry], kept: set[bytes]) -> int:
    """Return the most bytes that eviction can free."""
    left = dict(entries)
    while may_go := list_removable(left, kept):
        for entry in may_go:
            del left[entry.key]
    return size_of(entries) - size_of(left)


def size_of(entries: dict[bytes, Entry]) -> int:
    return sum(entry.row.size_bytes for entry in entries.values())


def list_removable(entries: dict[bytes, Entry], kept: set[bytes]) -> list[Entry]:
    parents = {entry.parent for entry in entries.values()}
    return [
        entry
        for entry in entries.values()
        if not entry.pinned and entry.key not in kept and entry.key not in parents
    ]


@given(
    seconds=st.floats(0.001, 1e4),
    size=st.integers(1, 1 << 40),
    unused=st.floats(0, 1e7),
)
def test_worth_grows_with_seconds_and_falls_with_bytes_and_time(seconds, size, unused):
    def of(seconds: float, size: int, unused: float) -> float:
        return worth(Entry(row(b"k", b"", seconds, size), 1e9 - unused, False), 1e9)

    mine = of(seconds, size, unused)
    assert mine < of(2 * seconds, size, unused)
    assert mine > of(seconds, 2 * size, unused)
    assert mine > of(seconds, size, 2 * unused + 1)
    assert of(seconds, size, -5.0) == of(seconds, size, 0.0)  # a clock that was set back


def test_bytes_of_a_store_come_late_and_nothing_else_waits(folder):
    """While one segment is being written, others are stored, found and deleted."""
    found = []

    def buffers():
        assert store(folder, RULES) == Refused(RefusalReason.ALREADY_STORED)
        found.append(find(folder, RULES))
        assert store(folder, TURN) is None
        assert is_stored(folder, TURN)
        assert folder.gc().num_segments == 1
        yield from bytes_of(ITEMS, (RULES,))

    assert folder.store(record_of(RULES), buffers()) is None
    assert found[0].reason is FileMissReason.NONE_STORED
    assert is_stored(folder, RULES)
    assert store(folder, RULES) == Refused(RefusalReason.ALREADY_STORED)
    assert store(folder, DOCUMENT, TURN) == Refused(RefusalReason.PARENT_NOT_STORED)
