"""Which of several occurrences to follow: what most go on with, and the runner-up as a branch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ragflash.speculative.lookup.source_index import Interval, SourceIndex, distance

_MOST_RUNS = 16


class Branch(NamedTuple):
    """What the second most occurrences go on with where all part.

    Attributes:
        depth: Tokens of the continuation that all of them agree on.
        place: The branch's continuation begins here in the source, those tokens included.
        width: Tokens of the branch behind them.
    """

    depth: int
    place: int
    width: int


class Continuation(NamedTuple):
    """What follows the occurrences of a run of tokens.

    Attributes:
        place: The trunk begins here in the source.
        num_agreeing: Occurrences that go on as the trunk does where they part.
        branch: `None` where all agree, or there is no room.
    """

    place: int
    num_agreeing: int
    branch: Branch | None


def follow(
    index: SourceIndex, interval: Interval, width: int, place: int, *, has_branch: bool = True
) -> Continuation:
    """Choose what follows an interval.

    Where occurrences part for the first time, most go on. Of these the one is followed whose
    continuation begins first at or after `place`, or from the beginning of the source if none does;
    of equally many, too. To ask for the majority again at every further parting drafted no better.

    Args:
        index: Of the source.
        interval: The occurrences that count.
        width: Tokens of trunk and branch together.
        place: The token after the last one that was copied; 0 if none was.
        has_branch: Whether one is wanted.
    """
    length, start = interval.length, place - interval.length
    parted = index.stretch(interval, length + width)
    if parted.length == length + width:
        trunk = index.next_start(parted.low, parted.high, start)
        return Continuation(length + trunk, parted.size, None)
    (trunk, most), (second, fewer) = _two_largest(index, index.split(parted), start)
    share = branch_width(length + width - parted.length, most, fewer) if has_branch else 0
    branch = Branch(parted.length - length, length + second, share) if share else None
    return Continuation(length + trunk, most, branch)


def branch_width(num_behind: int, num_trunk: int, num_branch: int) -> int:
    """Return how many tokens a branch gets of those behind a fork: its share of occurrences.

    It is one at least where there are two, and never more than the trunk gets.
    """
    share = num_behind * num_branch // (num_trunk + num_branch)
    return max(share, 1) if num_behind > 1 else 0


def _two_largest(index: SourceIndex, bounds: Sequence[int], start: int) -> list[tuple[int, int]]:
    """Return the first occurrence from `start` on, and the size, of the two largest runs.

    Of runs as large as the second no more than `_MOST_RUNS` are looked at.
    """
    runs = sorted((low - high, low) for low, high in pairwise(bounds))
    second = runs[1][0]
    large = [run for run in runs[:_MOST_RUNS] if run[0] <= second]
    firsts = [(negative, index.next_start(low, low - negative, start)) for negative, low in large]
    ordered = sorted((negative, distance(start, first), first) for negative, first in firsts)
    return [(first, -negative) for negative, _, first in ordered[:2]]
