"""Compiles a request's constraint for one prompt. Runs on the caller's thread."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from ragflash.engine.constrain.cursor import Cursor
from ragflash.engine.constrain.free import FreeProgram, FreeState
from ragflash.engine.constrain.grammar import Grammars
from ragflash.engine.constrain.literal import trie
from ragflash.engine.constrain.marker import Marker
from ragflash.engine.constrain.quote import QuoteProgram
from ragflash.engine.constrain.quote_program import ranges_program, words_program
from ragflash.engine.constrain.recent import Recent
from ragflash.engine.constrain.source_text import SourceText, SourceTokens, build_source_text
from ragflash.engine.constrain.spelling import Spellings
from ragflash.engine.constrain.state import State
from ragflash.engine.constraint import (
    Choice,
    Constraint,
    Free,
    Grammar,
    Literal,
    QuoteFrom,
    Quoting,
)
from ragflash.engine.prompt import CompiledPrompt
from ragflash.engine.tokens import Tokenizer
from ragflash.errors import InputError

# Some 12 MB each for 140,000 tokens.
_NUM_TEXTS = 4
_NUM_MARKERS = 16

_Part = Choice | QuoteFrom | Quoting | Free | Literal | Grammar


class ConstraintCompiler:
    """Turns constraints into cursors; remembers what does not depend on the request.

    Args:
        tokenizer: Cuts fixed texts.
        token_bytes: Of every token id.
    """

    def __init__(self, tokenizer: Tokenizer, token_bytes: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._grammars = Grammars(tokenizer, token_bytes)
        self._markers: Recent[str, Marker] = Recent(_NUM_MARKERS)
        self._texts: Recent[bytes, SourceText | None] = Recent(_NUM_TEXTS)
        self._programs: Recent[tuple[bytes, int, int], QuoteProgram | None] = Recent(_NUM_TEXTS)

    def compile(self, constraint: Constraint, prompt: CompiledPrompt) -> Cursor:
        """Return a cursor at the start of a constraint.

        Args:
            constraint: As in the request.
            prompt: What is quoted.

        Raises:
            InputError: A part admits no text at all, or cannot be honoured.
            ConstraintUnsupported: What a grammar needs is not installed.
        """
        parts: list[State] = []
        for part in _flattened(constraint):
            parts += self._states(part, prompt)
        if not parts:
            raise InputError("the constraint has no part")
        return Cursor(tuple(parts), self._tokenizer.stop_ids)

    def forget_texts(self) -> None:
        """Forget the text of all prompts: a document is deleted."""
        self._texts.clear()
        self._programs.clear()

    def _states(self, part: _Part, prompt: CompiledPrompt) -> list[State]:
        match part:
            case Literal(text):
                return [trie([self._spelling(text)])]
            case Choice(texts):
                if not texts:
                    raise InputError("a choice needs at least one text")
                return [trie([self._spelling(text) for text in texts])]
            case Free(until, max_tokens):
                return [self._free(until, "", 0, max_tokens)]
            case Grammar():
                return [self._grammars.start(part)]
            case QuoteFrom():
                program = self._quote_program(part, prompt)
                if program is None:
                    raise InputError("nothing of the given sources and ranges can be quoted")
                return [program.begin()]
            case Quoting():
                return self._quoting(part, prompt)

    def _quoting(self, part: Quoting, prompt: CompiledPrompt) -> list[State]:
        """Lay out free text, quote and closing mark, so many times, then free text alone.

        Where nothing can be quoted, no quote may begin.
        """
        if not part.opening or part.max_quotes < 0:
            raise InputError("quotes need an opening mark and max_quotes of 0 or more")
        program = self._quote_program(part.quote, prompt) if part.max_quotes else None
        states: list[State] = []
        if program is not None:
            closing = trie([self._spelling(part.closing)])
            for num_left in range(part.max_quotes, 0, -1):
                opened = self._free(part.until, part.opening, 3 * num_left, part.max_tokens)
                states += [opened, program.begin(), closing]
        return [*states, self._free(part.until, part.opening, 0, part.max_tokens)]

    def _free(self, until: str, opening: str, num_quote_parts: int, max_tokens: int) -> FreeState:
        if max_tokens < 0:
            raise InputError(f"max_tokens = {max_tokens} of free text is negative")
        markers = self._marker(until), self._marker(opening)
        return FreeState(FreeProgram(*markers, num_quote_parts, max_tokens))

    def _marker(self, text: str) -> Marker:
        return self._markers.get(text, lambda: Marker(text.encode(), self._token_bytes))

    def _quote_program(self, quote: QuoteFrom, prompt: CompiledPrompt) -> QuoteProgram | None:
        if quote.min_words < 1 or quote.max_characters < 1:
            raise InputError("a quote needs min_words and max_characters of 1 or more")
        tokens = SourceTokens.of(quote.source_ids, prompt)
        key = tokens.content
        text = self._texts.get(key, lambda: build_source_text(tokens, self._spellings))
        if text is None:
            return None
        limits = {"min_words": quote.min_words, "max_characters": quote.max_characters}
        if not quote.ranges:
            return self._programs.get(
                (key, quote.min_words, quote.max_characters), lambda: words_program(text, **limits)
            )
        index = {name: at for at, name in enumerate(prompt.source_ids)}
        ranges = [(index[name], a, b) for name, a, b in quote.ranges if name in index]
        return ranges_program(text, ranges, **limits)

    @cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self._token_bytes)

    def _spelling(self, text: str) -> Sequence[int]:
        token_ids = self._tokenizer.encode(text)
        if not token_ids:
            raise InputError(f"{text!r} has no token and cannot be constrained to")
        return token_ids


def _flattened(constraint: Constraint) -> Iterator[_Part]:
    if isinstance(constraint, tuple):
        for part in constraint:
            yield from _flattened(part)
    else:
        yield constraint
