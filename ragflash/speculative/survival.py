"""How far drafts hold, by where they come from."""

from collections.abc import Mapping
from dataclasses import dataclass

MOST_TOKENS = 64
_EDGES = (0, 1, 2, 3, 5, 8, 13, 21)  # positions that share a rate begin here
_ENDS = (*_EDGES[1:], MOST_TOKENS)
_FORGETTING = 0.97
_PRIOR_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class DraftKind:
    """Drafts that are likely to do alike.

    Attributes:
        source: See `Draft.source`.
        bucket: Of the confidence that the source has, ascending from 0.
    """

    source: str
    bucket: int = 0


class Survival:
    """For each kind of draft, how likely a token holds if all before it held.

    Counts fade, so that the newest tens of drafts decide. Where a position was not seen yet it has
    the rate of the one before, and the first one `prior(kind)`.
    """

    def __init__(self, priors: Mapping[str, tuple[float, ...]]) -> None:
        """Take priors by source, one a bucket; a source without them has 0.5."""
        self._priors = priors
        self._counts: dict[DraftKind, list[list[float]]] = {}

    def prior(self, kind: DraftKind) -> float:
        """Return the rate that a kind begins with."""
        of_source = self._priors.get(kind.source, (0.5,))
        return of_source[min(kind.bucket, len(of_source) - 1)]

    def expected(self, kind: DraftKind, num_tokens: int) -> list[float]:
        """Return how many tokens are expected to hold of the first 0, 1, … `num_tokens`."""
        expected, rate, all_hold = [0.0], self.prior(kind), 1.0
        for (held, seen), begin, end in zip(self._of(kind), _EDGES, _ENDS, strict=True):
            if begin >= num_tokens:
                break
            rate = (held + _PRIOR_WEIGHT * rate) / (seen + _PRIOR_WEIGHT)
            for _ in range(min(end, num_tokens) - begin):
                all_hold *= rate
                expected.append(expected[-1] + all_hold)
        return expected

    def observe(self, kind: DraftKind, num_drafted: int, num_held: int) -> None:
        """Count a draft of a chain of tokens, of which the first `num_held` held."""
        num_seen = min(num_drafted, num_held + 1, MOST_TOKENS)
        for group, begin, end in zip(self._of(kind), _EDGES, _ENDS, strict=True):
            if begin >= num_seen:
                break
            seen, held = min(end, num_seen) - begin, min(end, num_seen, num_held) - begin
            missed = _FORGETTING ** (seen - held)
            group[0] = (group[0] * _FORGETTING**held + _faded(held)) * missed
            group[1] = group[1] * _FORGETTING**seen + _faded(seen)

    def export_state(self) -> dict[str, list[list[float]]]:
        """Return the counts of what was seen by `source/bucket`, as `load_state` takes them."""
        return {
            f"{kind.source}/{kind.bucket}": [[round(x, 4) for x in pair] for pair in counts]
            for kind, counts in self._counts.items()
            if any(seen for _, seen in counts)
        }

    def load_state(self, state: Mapping[str, list[list[float]]]) -> None:
        """Take over what `export_state` returned; kinds with other positions begin anew."""
        for name, counts in state.items():
            source, _, bucket = name.rpartition("/")
            if len(counts) == len(_EDGES):
                self._counts[DraftKind(source, int(bucket))] = [[*pair] for pair in counts]

    def _of(self, kind: DraftKind) -> list[list[float]]:
        return self._counts.setdefault(kind, [[0.0, 0.0] for _ in _EDGES])


def _faded(count: int) -> float:
    """Return what that many counts of one are together, each fading by those after it."""
    return (1 - _FORGETTING**count) / (1 - _FORGETTING)
