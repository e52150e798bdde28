"""Which of several occurrences to follow: what most go on with, and the runner-up as a branch."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

import numpy as np

from ragflash.speculative.lookup.source_index import Interval, SourceIndex


@dataclass(frozen=True, slots=True)
class Fork:
    """Where occurrences part for the first time.

    Attributes:
        depth: Tokens that all of them agree on.
        place: What the runner-up goes on with begins here in the source, those tokens included.
        num_trunk: Occurrences that go on as the trunk does.
        num_branch: As the runner-up does.
    """

    depth: int
    place: int
    num_trunk: int
    num_branch: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows the occurrences of a run of tokens.

    Attributes:
        place: It begins here in the source.
        fork: `None` where all agree.
    """

    place: int
    fork: Fork | None


def follow(index: SourceIndex, interval: Interval, width: int, place: int) -> Continuation:
    """Choose what follows an interval.

    Wherever occurrences part, most go on; of equally many those with the first occurrence whose
    continuation begins at or after `place`, or from the beginning of the source if none does.

    Args:
        index: Of the source.
        interval: The occurrences that count.
        width: Tokens to look ahead.
        place: The token after the last one that was copied; 0 if none was.
    """
    return _Walk(index, interval.length, interval.length + width, place).follow(interval)


@dataclass(frozen=True, slots=True)
class _Walk:
    """From occurrences of `length` tokens to `end` tokens; see `follow` for `place`."""

    index: SourceIndex
    length: int
    end: int
    place: int

    def follow(self, interval: Interval) -> Continuation:
        parted = self.index.stretch(interval, self.end)
        if parted is None or parted.length == self.end:
            return Continuation(self._begin(parted or interval), None)
        bounds = self.index.split(parted)
        sizes = [*map(sub, bounds[1:], bounds)]
        places = []
        counts = []
        for _ in range(2):
            run = self._largest(bounds, sizes)
            counts.append(sizes[run])
            places.append(self._descend(Interval(bounds[run], bounds[run + 1], parted.length)))
            sizes[run] = 0
        return Continuation(places[0], Fork(parted.length - self.length, places[1], *counts))

    def _descend(self, interval: Interval) -> int:
        """Return where the continuation begins that most go on with, to the end."""
        while True:
            parted = self.index.stretch(interval, self.end)
            if parted is None or parted.length == self.end:
                return self._begin(parted or interval)
            bounds = self.index.split(parted)
            run = self._largest(bounds, [*map(sub, bounds[1:], bounds)])
            interval = Interval(bounds[run], bounds[run + 1], parted.length)

    def _begin(self, interval: Interval) -> int:
        return self.length + self.index.next_start(interval, self.place - self.length)

    def _largest(self, bounds: Sequence[int], sizes: Sequence[int]) -> int:
        """Choose a run of occurrences."""
        most = max(sizes)
        if sizes.count(most) == 1:
            return sizes.index(most)
        tied = [at for at, size in enumerate(sizes) if size == most]
        members = np.asarray([bounds[at] for at in tied])[:, None] + np.arange(most)
        starts = self.index.suffixes[members] - (self.place - self.length)
        return tied[int((starts % len(self.index)).min(axis=1).argmin())]
