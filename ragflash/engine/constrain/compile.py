"""Compiles a request's constraint for one prompt. Runs on the caller's thread."""

from collections.abc import Iterator, Sequence

from ragflash.engine.constrain.cursor import Cursor
from ragflash.engine.constrain.free import FreeProgram, FreeState
from ragflash.engine.constrain.literal import trie
from ragflash.engine.constrain.quote_program import build_quote_program
from ragflash.engine.constrain.state import State
from ragflash.engine.prompt import CompiledPrompt
from ragflash.engine.request import Choice, Constraint, Free, Literal, QuoteFrom
from ragflash.engine.tokens import Tokenizer
from ragflash.errors import InputError


def compile_constraint(
    constraint: Constraint,
    prompt: CompiledPrompt,
    tokenizer: Tokenizer,
    token_bytes: Sequence[bytes],
) -> Cursor:
    """Return a cursor at the start of a constraint.

    Args:
        constraint: As in the request.
        prompt: What `QuoteFrom` quotes.
        tokenizer: Cuts fixed texts.
        token_bytes: Of every token id.

    Raises:
        InputError: A part admits no text at all.
    """
    parts: list[State] = []
    for part in _flattened(constraint):
        match part:
            case Literal(text):
                parts.append(trie([_spelling(text, tokenizer)]))
            case Choice(texts):
                if not texts:
                    raise InputError("a choice needs at least one text")
                parts.append(trie([_spelling(text, tokenizer) for text in texts]))
            case Free(until, max_tokens):
                if max_tokens < 0:
                    raise InputError(f"max_tokens = {max_tokens} of free text is negative")
                parts.append(FreeState(FreeProgram(until.encode(), max_tokens, token_bytes)))
            case QuoteFrom():
                parts.append(build_quote_program(part, prompt, tokenizer, token_bytes).start())
    if not parts:
        raise InputError("the constraint has no part")
    return Cursor(tuple(parts), tokenizer.stop_ids)


def _flattened(constraint: Constraint) -> Iterator[Choice | QuoteFrom | Free | Literal]:
    if isinstance(constraint, tuple):
        for part in constraint:
            yield from _flattened(part)
    else:
        yield constraint


def _spelling(text: str, tokenizer: Tokenizer) -> Sequence[int]:
    token_ids = tokenizer.encode(text)
    if not token_ids:
        raise InputError(f"{text!r} has no token and cannot be constrained to")
    return token_ids
