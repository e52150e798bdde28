"""Which tokens a text begins with, at many places of it at once.

The bytes of all tokens form a tree. It is walked from many places of a text together, one byte a
round, so that a mask costs a few array operations, however many places there are.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NONE = -1
_TABLE_SHARE = 300

Places = NDArray[np.int64]
Tokens = NDArray[np.int32]
Text = NDArray[np.uint16]


class Spellings:
    """The tree of a vocabulary; control tokens spell nothing and are not in it.

    Attributes:
        length: Bytes of each token.
        shorter: For each token, the one after it in order of length among those that spell its
            first bytes, `NONE` for the shortest. So a chain of these is all that a text begins
            with, tokens of the same bytes included.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        order = sorted((data, at) for at, data in enumerate(token_bytes) if data)
        lengths = np.array([len(data) for data, _ in order], dtype=np.int64)
        ids = np.array([at for _, at in order], dtype=np.int32)
        blob = np.frombuffer(b"".join(data for data, _ in order), dtype=np.uint8).astype(np.int64)
        self.token_bytes = token_bytes
        self.length = np.array([len(data) for data in token_bytes], dtype=np.int32)
        self.shorter = np.full(len(token_bytes), NONE, dtype=np.int32)
        self._levels: list[_Level] = []
        self._grow(blob, lengths, ids)
        self.is_byte = np.zeros(256, dtype=np.bool_)
        self.is_byte[self._levels[0].keys] = self._levels[0].best != NONE

    def longest(self, text: Text, places: Places) -> Tokens:
        """Return the longest token that spells what stands at each place, or `NONE`.

        Args:
            text: Bytes, each part ended by a number above 255.
            places: Indexes into it.
        """
        longest = np.full(len(places), NONE, dtype=np.int32)
        alive, nodes = np.arange(len(places)), np.zeros(len(places), dtype=np.int32)
        for depth, level in enumerate(self._levels):
            data = text[places[alive] + depth]
            is_text = data < 256
            alive, keys = alive[is_text], nodes[is_text] * 256 + data[is_text]
            nodes = level.find(keys)
            alive, nodes = alive[nodes != NONE], nodes[nodes != NONE]
            longest[alive] = level.best[nodes]
            if not len(alive):
                break
        return longest

    def all_from(self, longest: Tokens) -> NDArray[np.int64]:
        """Return all tokens on the chains of `longest`, ascending."""
        is_found = np.zeros(len(self.length), dtype=np.bool_)
        is_found[longest[longest != NONE]] = True
        front = np.flatnonzero(is_found)
        while len(front):
            following = self.shorter[front]
            following = following[following != NONE]
            following = following[~is_found[following]]
            is_found[following] = True
            front = np.unique(following)
        return np.flatnonzero(is_found)

    def _grow(self, blob: Places, lengths: Places, ids: Tokens) -> None:
        """Make the tree from sorted tokens, so that nodes of a level are in order."""
        starts = np.cumsum(lengths) - lengths
        alive = np.arange(len(ids))
        parents, bests = np.zeros(len(ids), dtype=np.int64), np.full(1, NONE, dtype=np.int32)
        while len(alive):
            depth = len(self._levels)
            keys = parents * 256 + blob[starts[alive] + depth]
            is_new = np.append(True, keys[1:] != keys[:-1])
            nodes = np.cumsum(is_new) - 1
            num_parents, bests = len(bests), bests[parents[is_new]]
            ends = lengths[alive] == depth + 1  # tokens that end at this level
            self._link(ids[alive[ends]], nodes[ends], bests)
            self._levels.append(_Level(keys[is_new].astype(np.int32), bests, num_parents))
            goes_on = lengths[alive] > depth + 1
            alive, parents = alive[goes_on], nodes[goes_on]

    def _link(self, ids: Tokens, nodes: Places, best: Tokens) -> None:
        """Chain tokens that end at nodes of a level, given what was best on the way; updates it."""
        is_first = np.append(True, nodes[1:] != nodes[:-1])[: len(nodes)]
        before = np.append(NONE, ids[:-1]).astype(np.int32)[: len(ids)]
        self.shorter[ids] = np.where(is_first, best[nodes], before)
        best[nodes] = ids  # of tokens with the same bytes the last one stays


class _Level:
    """Nodes of one depth.

    Attributes:
        keys: 256 · number of the parent in its level + byte, ascending.
        best: Longest token on the way to each node.
    """

    def __init__(self, keys: Tokens, best: Tokens, num_parents: int) -> None:
        self.keys = keys
        self.best = best
        self._table: Tokens | None = None  # node of each key, where these lie close together
        if 256 * num_parents < _TABLE_SHARE * len(keys):
            self._table = np.full(256 * num_parents, NONE, dtype=np.int32)
            self._table[keys] = np.arange(len(keys), dtype=np.int32)

    def find(self, keys: Tokens) -> Tokens:
        """Return the nodes of keys, `NONE` for one that has none."""
        if self._table is not None:
            found: Tokens = self._table[keys]
            return found
        at = np.searchsorted(self.keys, keys).astype(np.int32)
        at[at == len(self.keys)] = 0
        return np.where(self.keys[at] == keys, at, np.int32(NONE))
