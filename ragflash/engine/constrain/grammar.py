"""Output that a grammar describes, so far a JSON schema, through llguidance.

llguidance's matcher moves with the output; a state here is a value that points to its predecessor.
So all states of one output share a matcher, which goes back and forth to where it is asked about.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from ragflash.engine.constrain.mask import Ids, TokenMask
from ragflash.engine.constraint import Grammar
from ragflash.engine.tokens import Tokenizer
from ragflash.errors import ConstraintUnsupported, InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# As `json.dumps` writes: one form, so that what a schema fixes needs no decision.
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes states for one vocabulary; safe from several threads.

    Args:
        tokenizer: Spells what a grammar forces.
        token_bytes: Of every token id.
    """

    def __init__(self, tokenizer: Tokenizer, token_bytes: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._stop_ids = sorted(tokenizer.stop_ids)

    def start(self, grammar: Grammar) -> "GrammarState":
        """Return the state before the first token.

        Raises:
            ConstraintUnsupported: llguidance is not installed, or no token ends an answer.
            InputError: The grammar is none, or asks for what cannot be honoured.
        """
        library, vocabulary = self._library
        try:
            text = library.LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_FORM)
        except ValueError as error:
            raise InputError(f"the JSON schema cannot be read: {error}") from error
        matcher = library.LLMatcher(vocabulary, text, log_level=0)
        if matcher.is_error():
            raise InputError(f"the JSON schema cannot be honoured: {matcher.get_error()}")
        stop_ids = np.array(self._stop_ids, dtype=np.int64)
        return _Matcher(matcher, stop_ids, len(self._token_bytes)).root

    @cached_property
    def _library(self) -> tuple[ModuleType, object]:
        """llguidance, and the vocabulary in its terms: a fifth of a second."""
        try:
            import llguidance  # noqa: PLC0415  (only who asks for a grammar needs it)
        except ImportError as error:
            raise ConstraintUnsupported(
                "a grammar needs the package llguidance, which is not installed"
            ) from error
        if not self._stop_ids:
            raise ConstraintUnsupported("a grammar needs a model that can end its answers")
        wrapped = _WrappedTokenizer(self._tokenizer, self._token_bytes, self._stop_ids[0])
        return llguidance, llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(wrapped),
            n_vocab=len(self._token_bytes),
            eos_token=self._stop_ids,
        )


class _WrappedTokenizer:
    """A tokenizer as llguidance wants it."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, token_bytes: Sequence[bytes], eos_token_id: int
    ) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id = eos_token_id
        self.tokens = token_bytes
        self.special_token_ids = [at for at, data in enumerate(token_bytes) if not data]

    def __call__(self, text: str | bytes) -> list[int]:
        return [*self._encode(text if isinstance(text, str) else text.decode())]


class _Matcher:
    """llguidance's matcher, and the state that it is at.

    Attributes:
        root: The state before the first token.
    """

    def __init__(self, matcher: "LLMatcher", stop_ids: Ids, num_tokens: int) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._num_tokens = num_tokens
        self.root = GrammarState(self)
        self._at = self.root

    def at(self, state: "GrammarState") -> "LLMatcher":
        """Go back to the last state that lies on the way to another, and forth from there."""
        here, target = self._at, state
        num_back, ahead = 0, []
        while here is not target:
            if target.num_tokens > here.num_tokens:
                ahead.append(target.token_id)
                target = target.previous
            else:
                num_back += 1
                here = here.previous
        if num_back:
            self._matcher.rollback(num_back)
        if ahead:
            self._matcher.consume_tokens(ahead[::-1])
        self._at = state
        return self._matcher

    def mask(self, state: "GrammarState") -> TokenMask:
        """Return what the grammar goes on with, in the shorter of its two forms."""
        bits = np.frombuffer(self.at(state).compute_bitmask(), dtype=np.uint8)
        is_allowed = np.unpackbits(bits, count=self._num_tokens, bitorder="little").view(np.bool_)
        is_allowed[self._stop_ids] = False
        is_short = bool(2 * np.count_nonzero(is_allowed) <= self._num_tokens)
        ids = np.flatnonzero(is_allowed if is_short else ~is_allowed)
        return TokenMask(ids, is_allow=is_short)


@dataclass(frozen=True, slots=True, eq=False)
class GrammarState:
    """Where the grammar stands after a token that followed the state before."""

    matcher: _Matcher
    before: "GrammarState | None" = None
    token_id: int = 0
    num_tokens: int = 0

    @property
    def previous(self) -> "GrammarState":
        """The state before; the first has none."""
        assert self.before is not None
        return self.before

    @property
    def can_end(self) -> bool:
        """Whether the text is complete."""
        return self.matcher.at(self).is_accepting()

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow: the text is complete, or too much for the parser's limits."""
        return self.matcher.at(self).is_stopped()

    @property
    def num_skipped(self) -> int:
        """What follows the text is never left out."""
        return 0

    def mask(self) -> TokenMask:
        """Return what the grammar goes on with."""
        return self.matcher.mask(self)

    def permits(self, token_id: int) -> bool:
        """Tell whether the grammar goes on with a token."""
        return self.matcher.at(self).validate_tokens([token_id]) == 1

    def forced(self) -> tuple[int, ...]:
        """Return what the grammar fixes, as the tokenizer spells it."""
        return tuple(self.matcher.at(self).compute_ff_tokens())

    def step(self, token_id: int) -> "GrammarState":
        """Add a token."""
        return GrammarState(self.matcher, self, token_id, self.num_tokens + 1)
