"""The tokens inside a GGUF file, sorted by what may turn into them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from gguf import TokenType
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Segmenter

from ragflash.errors import GGUFInvalid
from ragflash.gguf.reader import GGUFFile

PREFIX = "tokenizer.ggml."
HIDDEN_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)  # no reader should see them
_MERGED_TYPES = (TokenType.NORMAL, TokenType.UNUSED)

# User-defined tokens are the vocabulary's way to say both "white space and HTML tags are taken
# whole" (Gemma) and "this begins a tool call" (Qwen, Gemma 4). Only the first kind is text.
_TEXT_ATOM = re.compile(
    r"\s+|</?(?:a|b|bbox|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s"
    r"|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)

Merge = tuple[str, str]


@dataclass(frozen=True)
class Vocabulary:
    """All tokens of a file; ids are positions.

    Attributes:
        types: Of each token, as `gguf.TokenType` counts.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """Read tokens and types.

        Raises:
            GGUFInvalid: There are none, or not as many types as tokens.
        """
        tokens = file.require_array(f"{PREFIX}tokens", str)
        types = file.require_array(f"{PREFIX}token_type", int)
        if not tokens or len(types) != len(tokens):
            raise GGUFInvalid(
                f"{PREFIX}token_type", 0, f"{len(types)} types for {len(tokens)} tokens"
            )
        return cls(tokens, types)

    @cached_property
    def merged(self) -> dict[str, int]:
        """Tokens that merges make out of plain text."""
        return self._select(_MERGED_TYPES)

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Tokens that stand for one byte of a character that has no token."""
        return self._select((TokenType.BYTE,))

    @cached_property
    def atoms(self) -> dict[str, int]:
        """User-defined tokens that plain text turns into wherever it spells them."""
        user_defined = self._select((TokenType.USER_DEFINED,))
        return {t: token_id for t, token_id in user_defined.items() if _TEXT_ATOM.fullmatch(t)}

    @cached_property
    def markup(self) -> dict[str, int]:
        """Tokens that only a chat template may spell."""
        reserved = self._select((*HIDDEN_TYPES, TokenType.USER_DEFINED))
        return {t: token_id for t, token_id in reserved.items() if t and t not in self.atoms}

    def _select(self, kinds: Sequence[int]) -> dict[str, int]:
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in kinds
        }


@dataclass(frozen=True)
class Spelling:
    """How a kind of vocabulary writes text.

    Attributes:
        segmenter: Cuts plain text into ids.
        token_bytes: What each token adds to a text; nothing for hidden ones.
        is_covered: `[256]`, whether a byte of text ends up in some token.
        escaped: A character that the segmenter cannot tell from a blank, if there is one, and
            the ids of its bytes.
        add_bos: Whether a prompt begins with BOS where the file does not say; `None` where it
            does whatever the file says.
        opening: What the model was trained to see in front of every text: a blank, or nothing.
        is_by_words: Whether pieces of `word_cuts` are segmented as the whole text is.
    """

    segmenter: Segmenter
    token_bytes: list[bytes]
    is_covered: NDArray[np.bool_]
    add_bos: bool | None
    escaped: tuple[str, tuple[int, ...]] | None = None
    opening: str = ""
    is_by_words: bool = False


class MarkupFinder:
    """Finds the tokens that only a template may spell; the longest where several begin.

    A vocabulary may have thousands of them, which a regular expression would try one by one.
    """

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self.tokens = frozenset(filter(None, tokens))
        self._lengths = sorted({len(token) for token in self.tokens}, reverse=True)
        starts = re.escape("".join(sorted({token[0] for token in self.tokens})))
        self._start = re.compile(f"[{starts}]" if starts else r"(?!)")

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The runs that make up a text, none empty, and whether each is such a token."""
        begin = position = 0
        while found := self._start.search(text, position):
            at = found.start()
            candidates = (text[at : at + length] for length in self._lengths)
            token = next((each for each in candidates if each in self.tokens), None)
            if token is None:
                position = at + 1
                continue
            if begin < at:
                yield text[begin:at], False
            yield token, True
            begin = position = at + len(token)
        if begin < len(text):
            yield text[begin:], False


def parse_merges(file: GGUFFile) -> list[Merge]:
    """Read the pairs that merge, first ones first; a blank parts left from right."""
    merges = []
    for merge in file.require_array(f"{PREFIX}merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return merges


def take_whole(segmenter: Segmenter, atoms: Iterable[str]) -> None:
    """Have the segmenter cut these tokens out of a text before it merges what lies between."""
    segmenter.add_tokens([AddedToken(atom, normalized=False, special=False) for atom in atoms])
