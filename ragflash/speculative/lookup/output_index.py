"""What followed the last tokens before in the text that is being written, and before it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragflash.speculative.lookup.source_index import GRAM, TOKEN_BYTES, encode

MOST_PLACES = 16
"""Places that are compared, the newest first."""

_TOKEN_BITS = 8 * TOKEN_BYTES
_GRAM_MASK = (1 << GRAM * _TOKEN_BITS) - 1


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The last tokens, found before.

    Attributes:
        length: Tokens in common, `GRAM` to the most that were asked for.
        places: Of what followed, in the order of preference: one for each token that may be next.
        counts: Occurrences that go on with it.
    """

    length: int
    places: tuple[int, ...]
    counts: tuple[int, ...]


class OutputIndex:
    """Grows with a text, in constant time a token.

    Places with the same last `GRAM` tokens are chained, the newest first.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._token_ids: list[int] = []
        self._newest: dict[int, int] = {}
        self._before: list[int] = []
        self._gram = _GRAM_MASK  # no token has all bits set

    def __len__(self) -> int:
        """Count tokens."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take over what was written."""
        gram, newest, before, written = self._gram, self._newest, self._before, self._token_ids
        for token_id in token_ids:
            gram = (gram << _TOKEN_BITS | token_id) & _GRAM_MASK
            written.append(token_id)
            before.append(newest.get(gram, 0))
            newest[gram] = len(written)
        self._gram = gram
        self._text += encode(token_ids)

    def tokens(self, place: int, count: int) -> tuple[int, ...]:
        """Return what followed a place; at the end the text goes on as it did from there."""
        period = len(self) - place
        return tuple(self._token_ids[place + at % period] for at in range(count))

    def longest(self, most: int) -> Recurrence | None:
        """Find the longest end of the text, to `most` tokens, among the newest with its last ones.

        What most places with that end go on with comes first, of equally many the newest.
        """
        length, places = 0, list[int]()
        for place in self._newest_places():
            agreed = self._agreed(place, most)
            if agreed > length:
                length, places = agreed, []
            if agreed == length:
                places.append(place)
        if not places:
            return None
        newest: dict[int, int] = {}
        for place in places:
            newest.setdefault(self._token_ids[place], place)
        counts = Counter(self._token_ids[place] for place in places).most_common()
        return Recurrence(
            length, tuple(newest[token_id] for token_id, _ in counts), tuple(n for _, n in counts)
        )

    def _newest_places(self) -> Iterator[int]:
        place = self._before[-1] if self._before else 0
        for _ in range(MOST_PLACES):
            if not place:
                return
            yield place
            place = self._before[place - 1]

    def _agreed(self, place: int, most: int) -> int:
        """Count the tokens before a place that are the last ones of the text, to `most`."""
        end = place * TOKEN_BYTES
        there = self._text[max(0, end - most * TOKEN_BYTES) : end]
        here = self._text[-len(there) :]
        differing = int.from_bytes(there, "big") ^ int.from_bytes(here, "big")
        if not differing:
            return len(there) // TOKEN_BYTES
        return ((differing & -differing).bit_length() - 1) // _TOKEN_BITS
