"""Trees of drafts, from what drafters think of the next places and from whole continuations.

A tree is worth its expected accepted length, the sum of the probabilities that its tokens become
output. A block drafter predicts places side by side, so a token's is the product of those on its
path; of a continuation that was looked up it has been counted. Neither grows along a path, so that
taking the likeliest token that is not there yet, again and again, gives the best tree of any size
(Wang et al. 2024, "OPT-Tree", arXiv:2406.17276, section 3).
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import NamedTuple

from ragflash.speculative.drafter import Draft


@dataclass(frozen=True, slots=True)
class Marginals:
    """What a block drafter says of the next places.

    Attributes:
        token_ids: Of each place the likeliest tokens, the best first.
        log_probs: Theirs.
        source: See `Draft.source`.
    """

    token_ids: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]
    source: str


@dataclass(frozen=True, slots=True)
class Graft:
    """A draft, chain or tree, that may become branches of another.

    Attributes:
        draft: Its tokens.
        survival: Of each, how likely it becomes output; at most that of its parent.
    """

    draft: Draft
    survival: Sequence[float]


class _Placed(NamedTuple):
    """A token of the marginals behind a node, -1 for the root.

    Attributes:
        rank: Among the tokens of its place.
        before: Cost of the places before it, `-log` of their probabilities.
        is_trunk: Whether it is wanted whatever it is worth.
    """

    parent: int
    token_id: int
    place: int
    rank: int
    before: float
    is_trunk: bool


class _Grafted(NamedTuple):
    """A token of a graft, `at` its index there, behind a node, -1 for the root."""

    parent: int
    token_id: int
    number: int
    at: int


def build_tree(
    num_tokens: int,
    marginals: Marginals | None = None,
    grafts: Sequence[Graft] = (),
    *,
    num_trunk: int = 0,
) -> Draft:
    """Return the best tree of at most so many tokens; none is proposed twice after the same ones.

    Tokens stand depth first, the likelier child before the other, so that a model has to go back to
    where a branch begins as seldom as can be.

    Args:
        num_tokens: Most tokens.
        marginals: Of a block drafter; `None` without one.
        grafts: Other drafts. What they begin alike is there once.
        num_trunk: The likeliest tokens of so many places are in the tree, whatever they are worth:
            probabilities that are too flat would else make it broad instead of deep.
    """
    growth = _Growth(marginals, grafts, num_trunk)
    growth.grow(num_tokens)
    return growth.draft()


class _Growth:
    """A tree while it grows; nodes are numbered in the order of their worth."""

    def __init__(
        self, marginals: Marginals | None, grafts: Sequence[Graft], num_trunk: int
    ) -> None:
        self._marginals = marginals or Marginals((), (), grafts[0].draft.source if grafts else "")
        self._grafts = grafts
        self._num_trunk = num_trunk
        self._heap: list[tuple[float, int, _Placed | _Grafted]] = []  # by cost, then order
        self._num_found = 0
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token
        self._sources: list[str] = []
        self._following = [_following(graft.draft) for graft in grafts]
        self._find_placed(-1, 0, 0, 0.0, on_trunk=True)
        for number in range(len(grafts)):
            self._find_grafted(-1, number, -1)

    def grow(self, num_tokens: int) -> None:
        """Take the likeliest tokens until there are so many."""
        while self._heap and len(self._nodes) < num_tokens:
            best = heapq.heappop(self._heap)[2]
            node = self._nodes.setdefault((best.parent, best.token_id), len(self._nodes))
            is_new = node == len(self._sources)
            if isinstance(best, _Grafted):
                source = self._grafts[best.number].draft.source_of(best.at)
                self._find_grafted(node, best.number, best.at)
            else:
                source = self._marginals.source
                cost = best.before - self._marginals.log_probs[best.place][best.rank]
                self._find_placed(best.parent, best.place, best.rank + 1, best.before)
                self._find_placed(node, best.place + 1, 0, cost, on_trunk=best.is_trunk)
            if is_new:
                self._sources.append(source)

    def draft(self) -> Draft:
        """Return the nodes depth first."""
        children: dict[int, list[int]] = {}
        for (parent, _), node in self._nodes.items():
            children.setdefault(parent, []).append(node)
        order = [*_depth_first(children, -1)]
        index_of = {-1: -1} | {node: index for index, node in enumerate(order)}
        keys = [*self._nodes]
        sources = tuple(self._sources[node] for node in order)
        main = self._marginals.source
        return Draft(
            tuple(keys[node][1] for node in order),
            main,
            tuple(index_of[keys[node][0]] for node in order),
            None if {*sources} <= {main} else sources,
        )

    def _find_placed(
        self, parent: int, place: int, rank: int, before: float, *, on_trunk: bool = False
    ) -> None:
        """Find a place's token of some rank behind a node that places of that cost lead to."""
        tokens = self._marginals.token_ids[place : place + 1]
        if not tokens or rank >= len(tokens[0]):
            return
        cost = before - self._marginals.log_probs[place][rank]
        is_trunk = on_trunk and place < self._num_trunk
        if cost < inf:
            found = _Placed(parent, tokens[0][rank], place, rank, before, is_trunk)
            self._push(-inf if is_trunk else cost, found)

    def _find_grafted(self, node: int, number: int, index: int) -> None:
        """Find what follows a graft's token, -1 for its beginning, that a node stands for."""
        graft = self._grafts[number]
        for child in self._following[number].get(index, ()):
            survival = graft.survival[child]
            if survival > 0:
                found = _Grafted(node, graft.draft.token_ids[child], number, child)
                self._push(-log(survival), found)

    def _push(self, cost: float, found: _Placed | _Grafted) -> None:
        self._num_found += 1
        heapq.heappush(self._heap, (cost, self._num_found, found))


def _depth_first(children: Mapping[int, Sequence[int]], node: int) -> Iterator[int]:
    for child in children.get(node, ()):
        yield child
        yield from _depth_first(children, child)


def _following(draft: Draft) -> dict[int, list[int]]:
    """Return the indexes that follow each, -1 for the end of the history."""
    following: dict[int, list[int]] = {}
    for index in range(len(draft)):
        following.setdefault(draft.parent(index), []).append(index)
    return following
