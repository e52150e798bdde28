"""What a step costs, by its rows and by the tokens before it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

_BUCKET_TOKENS = 64
_NEWEST_SHARE = 0.1
_MOST_OFF = 3.0  # a step that took longer by more was held up by something else, too


class StepCosts:
    """Milliseconds of a step of one sequence, as measured at the start and corrected by real steps.

    Between measured rows and lengths they are interpolated, in steps of 64 tokens. A real step
    takes longer than its forward by what is done around it, and by what else the machine does: each
    measured number of rows has a factor that follows the newest steps of so many rows, or fewer
    down to the next. So have plain steps that are begun before the token before them is known.

    Args:
        measured_ms: By length in tokens, then by rows; the same rows for every length.
        ahead_share: Of a step of one row, what one takes that was begun early; `None` where none
            is.

    Raises:
        ValueError: Nothing was measured, or not the same rows everywhere, or no time passed.
    """

    def __init__(
        self, measured_ms: Mapping[int, Mapping[int, float]], ahead_share: float | None = None
    ) -> None:
        self._lengths = sorted(measured_ms)
        rows = {tuple(sorted(of_length)) for of_length in measured_ms.values()}
        if len(rows) != 1 or not min(rows):
            raise ValueError(f"costs of the same rows are wanted for every length, not {rows}")
        self._rows = [*min(rows)]
        self._table = [[measured_ms[at][rows] for rows in self._rows] for at in self._lengths]
        if not all(ms > 0 for of_length in self._table for ms in of_length):
            raise ValueError("a step takes more than no time")
        most = self._rows[-1]
        dense = [[_interpolate(self._rows, of, at) for at in range(most + 1)] for of in self._table]
        self._dense = dense
        self._factors = [1.0] * len(self._rows)
        self._ahead = ahead_share
        self._numbers = [bisect_left(self._rows, at) for at in range(most + 1)]
        self._here: tuple[int, list[float]] = (-1, [])

    @property
    def rows(self) -> Sequence[int]:
        """Numbers of rows that were measured, ascending."""
        return self._rows

    def step_ms(self, rows: int, length: int) -> float:
        """Return what a step of so many rows takes behind `length` tokens."""
        rows = min(rows, self._rows[-1])
        return self._behind(length)[rows] * self._factors[self._numbers[rows]]

    def ahead_ms(self, length: int) -> float:
        """Return what a step of one row takes in plain decoding: begun early, if any is."""
        if self._ahead is None:
            return self.step_ms(1, length)
        return self._behind(length)[1] * self._ahead

    def observe(self, rows: int, length: int, ms: float) -> None:
        """Take a real step into account."""
        number = self._numbers[min(rows, self._rows[-1])]
        self._factors[number] *= _correction(ms / self.step_ms(rows, length))

    def observe_ahead(self, length: int, ms: float) -> None:
        """Take a real step of one row into account that was begun early."""
        assert self._ahead is not None
        self._ahead *= _correction(ms / self.ahead_ms(length))

    def _behind(self, length: int) -> list[float]:
        """Return the measured milliseconds of 0, 1, … rows behind a length."""
        bucket, costs = self._here
        if bucket != length // _BUCKET_TOKENS:
            bucket = length // _BUCKET_TOKENS
            columns = zip(*self._dense, strict=True)
            length = bucket * _BUCKET_TOKENS
            costs = [_interpolate(self._lengths, column, length) for column in columns]
            self._here = bucket, costs
        return costs


def _correction(ratio: float) -> float:
    return 1 + _NEWEST_SHARE * (min(ratio, _MOST_OFF) - 1)


def _interpolate(points: Sequence[int], values: Sequence[float], at: int) -> float:
    """Return the value between two points; outside of all that of the nearest."""
    high = bisect_left(points, at)
    if high == 0 or high == len(points):
        return values[min(high, len(points) - 1)]
    low = high - 1
    share = (at - points[low]) / (points[high] - points[low])
    return values[low] + (values[high] - values[low]) * share
