"""Which tokens may come next, as a short list of ids: those allowed, or those banned."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Either `ids` alone may come next, or everything but them.

    Attributes:
        ids: Ascending, without repeats.
        is_allow: Whether `ids` are the permitted tokens; otherwise they are the forbidden ones.
    """

    ids: Ids
    is_allow: bool

    def permits(self, token_id: int) -> bool:
        """Tell whether a token may come next."""
        at = int(np.searchsorted(self.ids, token_id))
        is_listed = at < len(self.ids) and int(self.ids[at]) == token_id
        return is_listed == self.is_allow

    @property
    def only(self) -> int | None:
        """The token that must come next, when there is no other."""
        return int(self.ids[0]) if self.is_allow and len(self.ids) == 1 else None


ANYTHING = TokenMask(np.empty(0, dtype=np.int64), is_allow=False)


def allow(token_ids: Ids) -> TokenMask:
    """Permit these tokens alone, given in any order."""
    return TokenMask(np.unique(token_ids), is_allow=True)


def union(a: TokenMask, b: TokenMask) -> TokenMask:
    """Permit what either permits."""
    if a.is_allow and b.is_allow:
        return TokenMask(np.union1d(a.ids, b.ids), is_allow=True)
    if not a.is_allow and not b.is_allow:
        return TokenMask(np.intersect1d(a.ids, b.ids), is_allow=False)
    banned, allowed = (b, a) if a.is_allow else (a, b)
    return TokenMask(np.setdiff1d(banned.ids, allowed.ids), is_allow=False)
