"""What followed the last tokens before in the text that is being written, and before it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_PLACES = 16
"""Places that are compared, the newest first."""


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
        self._token_ids: list[int] = []
        self._newest: dict[tuple[int, int, int], int] = {}
        self._before: list[int] = []
        self._last = (-1, -1)

    def __len__(self) -> int:
        """Count tokens."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take over what was written."""
        newest, before, end = self._newest, self._before, len(self)
        first, second = self._last
        for token_id in token_ids:
            end += 1
            gram = (first, second, token_id)  # `GRAM` tokens
            before.append(newest.get(gram, 0))
            newest[gram] = end
            first, second = second, token_id
        self._last = (first, second)
        self._token_ids += token_ids

    def tokens(self, place: int, count: int) -> tuple[int, ...]:
        """Return what followed a place; at the end the text goes on as it did from there."""
        period = len(self) - place
        return tuple(self._token_ids[place + at % period] for at in range(count))

    def longest(self, least: int, most: int) -> Recurrence | None:
        """Find the longest end of the text, of `least` to `most` tokens, among the newest places.

        `least` is `GRAM` or more. What most places with that end go on with comes first, of equally
        many the newest.
        """
        length, places = least, list[int]()
        for place in self._newest_places():
            agreed = self._agreed(place, length, most)
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

    def _agreed(self, place: int, least: int, most: int) -> int:
        """Count the tokens before a place that are the last ones of the text, to `most`.

        0 stands for fewer than `least`.
        """
        written, agreed = self._token_ids, least
        if least > most or least > place or written[place - least : place] != written[-least:]:
            return 0
        most = min(most, place)
        while agreed < most and written[place - 1 - agreed] == written[-1 - agreed]:
            agreed += 1
        return agreed
