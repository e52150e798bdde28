"""Which segments go when room is needed: those that save the fewest seconds for their bytes.

After GreedyDual-Size with Frequency (Cherkasova, 1998), with the time since the last use in place
of a count of uses, so that it can be read off the files after a restart.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ragflash.kvcache.segments import ROOT_KEY
from ragflash.sessions.index import SegmentRow

_RECENT_S = 3600.0


@dataclass(slots=True)
class Entry:
    """A stored file, with what changes while it is stored."""

    row: SegmentRow
    last_used_s: float
    pinned: bool

    @property
    def key(self) -> bytes:
        """Its name."""
        return self.row.keys.key

    @property
    def parent(self) -> bytes:
        """Name of the one before it."""
        return self.row.keys.parent


def worth(entry: Entry, now_s: float) -> float:
    """Seconds that it saves for each of its bytes, less the longer it has not been used.

    Within the last hour recency hardly counts; after it, worth halves when the time doubles.
    """
    unused_s = max(0.0, now_s - entry.last_used_s)
    return entry.row.prefill_seconds / entry.row.size_bytes / (_RECENT_S + unused_s)


def plan_eviction(
    entries: Mapping[bytes, Entry],
    num_bytes: float,
    kept: Collection[bytes],
    now_s: float,
    first: str | None = None,
) -> list[Entry] | None:
    """Choose entries to remove, in that order.

    Entries whose own beginning is not stored go first; what is pinned, in `kept`, or has others
    that follow it stays.

    Args:
        entries: All of them by key.
        num_bytes: How much is to become free.
        kept: Keys that are needed.
        now_s: Unix time.
        first: Namespace whose entries go before those of others.

    Returns:
        `None` when all that may go is not enough.
    """
    victims: list[Entry] = []
    freed = 0
    for entry in _by_worth(entries, kept, now_s, first):
        if freed >= num_bytes:
            break
        victims.append(entry)
        freed += entry.row.size_bytes
    return victims if freed >= num_bytes else None


def _by_worth(
    entries: Mapping[bytes, Entry], kept: Collection[bytes], now_s: float, first: str | None
) -> Iterator[Entry]:
    following = Counter(entry.parent for entry in entries.values())
    queue: list[tuple[bool, float, bytes]] = []

    def offer(entry: Entry) -> None:
        if entry.pinned or entry.key in kept or following[entry.key]:
            return
        if _is_reachable(entries, entry):
            is_foreign = first is not None and entry.row.namespace != first
            heapq.heappush(queue, (is_foreign, worth(entry, now_s), entry.key))
        else:
            heapq.heappush(queue, (False, -1.0, entry.key))

    for entry in entries.values():
        offer(entry)
    while queue:
        victim = entries[heapq.heappop(queue)[-1]]
        yield victim
        following[victim.parent] -= 1
        if victim.parent in entries:
            offer(entries[victim.parent])


def _is_reachable(entries: Mapping[bytes, Entry], entry: Entry) -> bool:
    while entry.parent != ROOT_KEY:
        if entry.parent not in entries:
            return False
        entry = entries[entry.parent]
    return True
