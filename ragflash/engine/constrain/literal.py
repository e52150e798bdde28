"""Fixed texts, one of several (`Choice`) or just one (`Literal`), as a tree of tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ragflash.engine.constrain.mask import TokenMask, allow


@dataclass(slots=True)
class _Node:
    is_end: bool = False
    children: dict[int, "_Node"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrieState:
    """A place in the tree; each text has the one spelling that the tokenizer gives it."""

    node: _Node

    @property
    def can_end(self) -> bool:
        """Whether a text ends here."""
        return self.node.is_end

    @property
    def is_done(self) -> bool:
        """Whether no text goes on from here."""
        return not self.node.children

    @property
    def num_skipped(self) -> int:
        """What follows a text is never left out."""
        return 0

    def mask(self) -> TokenMask:
        """Return the tokens that some text continues with."""
        return allow(np.fromiter(self.node.children, dtype=np.int64))

    def permits(self, token_id: int) -> bool:
        """Tell whether some text continues with a token."""
        return token_id in self.node.children

    def forced(self) -> tuple[int, ...]:
        """Return the one continuation, if there is no other."""
        return tuple(self.node.children) if len(self.node.children) == 1 else ()

    def step(self, token_id: int) -> "TrieState":
        """Go down one token."""
        return TrieState(self.node.children[token_id])


def trie(texts: Iterable[Sequence[int]]) -> TrieState:
    """Return the root of a tree of token sequences, none of them empty."""
    root = _Node()
    for token_ids in texts:
        node = root
        for token_id in token_ids:
            node = node.children.setdefault(int(token_id), _Node())
        node.is_end = True
    return TrieState(root)
