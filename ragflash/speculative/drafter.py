"""The contract of a drafter: it proposes a chain or a tree of tokens, verified in one forward.

A drafter may be wrong; it can cost time, never change the output.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, each a one-point distribution to the verifier.

    Attributes:
        token_ids: Each stands behind its parent, so the first tokens of a draft are one, too.
        source: Who proposed them, `lookup`, `mtp`, …; of a grafted tree who proposed the trunk.
        parents: Of each token the index of the one before it, -1 for the end of the history; `None`
            is a chain.
        sources: Of each token, where they differ; `None`: all are of `source`.
        reason: Why there is no token.
        goes_on: Whether the next draft is likely to be empty as this one is, so that a plain step
            may begin before it is asked for.

    Raises:
        ValueError: Parents or sources do not fit the tokens.
    """

    token_ids: tuple[int, ...]
    source: str
    parents: tuple[int, ...] | None = None
    sources: tuple[str, ...] | None = None
    reason: str | None = None
    goes_on: bool = False

    def __post_init__(self) -> None:
        """Check that parents come first."""
        for given in (self.parents, self.sources):
            if given is not None and len(given) != len(self.token_ids):
                raise ValueError(f"{len(given)} parents or sources of {len(self.token_ids)} tokens")
        parents = self.parents or ()
        if min(parents, default=-1) < -1 or not all(map(lt, parents, range(len(parents)))):
            raise ValueError(f"a parent of {self.parents} does not come before its token")

    def __len__(self) -> int:
        """Count tokens."""
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before it."""
        return self.parents is None or all(p == at - 1 for at, p in enumerate(self.parents))

    def parent(self, index: int) -> int:
        """Return the index of the token before one, -1 for the end of the history."""
        return index - 1 if self.parents is None else self.parents[index]

    def source_of(self, index: int) -> str:
        """Return who proposed a token."""
        return self.source if self.sources is None else self.sources[index]

    def children(self) -> dict[tuple[int, int], int]:
        """Map an index (-1: the end of the history) and a token after it to that token's index.

        Of two children that are the same token the first counts.
        """
        found: dict[tuple[int, int], int] = {}
        for index, token_id in enumerate(self.token_ids):
            found.setdefault((self.parent(index), token_id), index)
        return found

    def path(self, index: int) -> tuple[int, ...]:
        """Return the indexes from the end of the history to a token, itself included."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.parent(index)
        return tuple(reversed(path))

    def leaves(self) -> tuple[int, ...]:
        """Return the indexes of tokens that nothing follows."""
        inner = {self.parent(index) for index in range(len(self))}
        return tuple(index for index in range(len(self)) if index not in inner)

    def first(self, count: int) -> "Draft":
        """Return the first tokens."""
        return self if count >= len(self) else self._only(range(count))

    def without(self, dropped: Collection[int]) -> "Draft":
        """Return the draft without some tokens and all that follow them."""
        kept: list[int] = []
        gone = {*dropped}
        for index in range(len(self)):
            if index in gone or self.parent(index) in gone:
                gone.add(index)
            else:
                kept.append(index)
        return self if not gone else self._only(kept)

    def _only(self, kept: Sequence[int]) -> "Draft":
        places = {-1: -1} | {index: place for place, index in enumerate(kept)}
        return Draft(
            tuple(self.token_ids[index] for index in kept),
            self.source,
            self.parents and tuple(places[self.parents[index]] for index in kept),
            self.sources and tuple(self.sources[index] for index in kept),
        )


class Drafter(Protocol):
    """State of one sequence's drafting; lives on the worker thread.

    In every step that ends with a decision about the next token, `propose` is called once, and then
    `observe` with what became of it. Tokens that no proposal was made for (forced ones, and the
    last of an output) are seen in the next history only.
    """

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """Propose at most `budget` tokens, possibly none, to follow prompt and output.

        `budget` is at least 1; what is over it is cut off, as are tokens that could not be emitted.
        """

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Tell what was verified, the proposal as it was cut, and which of it became output.

        Args:
            draft: May be empty, which also says that a step went by.
            accepted: Indexes of the tokens along the path that held, in order.
        """

    def export_state(self) -> bytes:
        """Return what a stored session keeps, so that proposals after it equal those before."""

    def load_state(self, state: bytes) -> None:
        """Take over what `export_state` of an equal drafter returned.

        Raises:
            ValueError: It is no such state.
        """
