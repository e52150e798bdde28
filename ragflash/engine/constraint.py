"""What an output is held to: data, compiled for a prompt and a vocabulary by `engine.constrain`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Union

MIN_WORDS = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """The output is exactly one of `texts`."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuoteFrom:
    """The output is a contiguous run of the prompt's text from these sources.

    Without `ranges` it begins and ends between words, and has `min_words` words, ten letters of a
    script without spaces, or is a whole line or table cell (a heading, a part number).

    Attributes:
        source_ids: Documents that may be quoted; only their spans in the prompt count.
        min_words: The quote does not end before so many words.
        max_characters: The quote ends at the latest there, at a permitted end where one is in
            reach.
        ranges: `(source_id, start, end)` in document characters, e.g. sentences: a quote runs from
            the start of one to the end of the same or a later one of the same source, white space
            at either end left out.
    """

    source_ids: tuple[str, ...]
    min_words: int = MIN_WORDS
    max_characters: int = 1200
    ranges: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Quoting:
    """Free text in which all that stands between quote marks is copied from sources.

    No quote may begin where the prompt has nothing that can be quoted.

    Attributes:
        quote: What stands between the marks.
        opening: Begins a quote wherever it is written; no tokens write it once there are
            `max_quotes`.
        closing: Follows each quote.
        max_quotes: 0 permits none.
        until: Ends the text, and is emitted too; empty is the end of the output.
        max_tokens: Each stretch of free text is cut there, and the text ends; 0 is no limit.
    """

    quote: QuoteFrom
    opening: str = '"'
    closing: str = '"'
    max_quotes: int = 3
    until: str = ""
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """Free text up to `until`, which is emitted too; an empty `until` is the end of the output.

    Attributes:
        max_tokens: Free text is cut there and the next constraint begins; 0 is no limit.
    """

    until: str = ""
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Literal:
    """The output is exactly `text`; costs a KV fill and no decision."""

    text: str


class GrammarDialect(StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The output is a text that a grammar describes, spaced as `json.dumps` does."""

    dialect: GrammarDialect
    text: str


Constraint = Union[Choice, QuoteFrom, Quoting, Free, Literal, Grammar, tuple["Constraint", ...]]


class ConstraintKind(StrEnum):
    """Kinds of constraints that an engine may be unable to honour."""

    QUOTE_FROM = "quote_from"
