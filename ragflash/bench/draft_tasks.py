"""What a model is asked while drafts are timed, and the documents that it is asked about.

A document is prose with a list of made-up parts in its middle. No two parts have the same name, so
that a small model can copy the list without losing its place.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ragflash.bench.record import LEAST_PAIRS
from ragflash.engine.request import ChatMessage, SegmentKind, Span, TextSegment
from ragflash.errors import EngineError, SettingInvalid

CONTEXTS = (1024, 4096, 7500)
"""Tokens of documents and questions together."""

COPIED_SHARE = 0.9
"""Of an answer's tokens, what must stand in the document to call it a copy."""

_RUN_TOKENS = 4  # as many in a row are found in the document or are not copied
_PARTS = (
    *("gasket", "seal ring", "hex bolt", "spring", "bearing", "valve stem", "filter", "fuse"),
    *("washer", "hose clamp", "drive belt", "relay", "coupling", "nozzle"),
)

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Task:
    """A question, and the most tokens of an answer: as many as what is asked for has."""

    question: str
    output_tokens: int


TASKS: Mapping[str, Task] = {
    "copy": Task(
        "Copy the list of parts in stock from the document above, line by line. Parts in "
        "stock, copied from the document above, line by line:",
        192,
    ),
    "quote": Task(
        "Quote the sentence of the document above that matters most to somebody who wants "
        "to pass the work on, and then explain in your own words what it means.",
        64,
    ),
    "list": Task(
        "List the most important things that the document above says, one a line, each of "
        "them in a few words, and begin each line with its number.",
        96,
    ),
    "rewrite": Task(
        "Rewrite the first paragraph of the document above in simpler words, so that a "
        "child can follow it, and keep all that it says in the order in which it is said.",
        96,
    ),
    "summary": Task(
        "Summarise the document above in five or six sentences, so that somebody who has "
        "not read it knows what it is about and what follows from it.",
        96,
    ),
    "free": Task(
        "Do not use the document above. Tell a story about a fisherman, his daughter and a "
        "storm at sea, in which everybody comes home in the end.",
        64,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured of a task at a length.

    Attributes:
        rounds: Answers of each kind, 7 or more.
        output_tokens: Most of an answer, by task.
        question_tokens: Of a context, what is left for the question and the template.
        list_rows: Parts in the document, 14 at most.
    """

    rounds: int = LEAST_PAIRS
    output_tokens: Mapping[str, int] = field(
        default_factory=lambda: {name: task.output_tokens for name, task in TASKS.items()}
    )
    question_tokens: int = 160
    list_rows: int = len(_PARTS)

    def __post_init__(self) -> None:
        """Raise `SettingInvalid` where the readings would say nothing."""
        if self.rounds < LEAST_PAIRS:
            raise SettingInvalid(f"{self.rounds} rounds: a ratio takes {LEAST_PAIRS} or more")
        if any(most < 2 for most in self.output_tokens.values()):
            raise SettingInvalid("an answer that is timed takes 2 tokens or more")


def make_document(prose: str, num_tokens: int, list_rows: int, tokenize: Tokenize) -> str:
    """Return prose of about that many tokens, with the list between two paragraphs.

    Raises:
        EngineError: The prose is too short.
    """
    parts = f"\n\nParts in stock:\n{_part_list(list_rows)}"
    left = num_tokens - len(tokenize(parts))
    share = left / len(tokenize(prose))
    if share > 1:
        raise EngineError(f"a text of more than {left} tokens is needed")
    taken = prose[: int(share * len(prose))]
    middle = max(0, taken.rfind("\n\n", 0, len(taken) // 2))
    return taken[:middle] + parts + taken[middle:]


def messages_of(task: str, context: int, document: str) -> tuple[ChatMessage, ...]:
    """Return a chat of a document and a task's question.

    What is learned belongs to a document's id, what is remembered to its tokens: so each task
    learns from nothing, and the document is read once.
    """
    source = Span(f"{task}-{context}", 0, 0, len(document))
    segments = (
        TextSegment(SegmentKind.DOCUMENT, document, (source,)),
        TextSegment(SegmentKind.QUESTION, f"\n\n{TASKS[task].question}"),
    )
    return (ChatMessage("user", segments),)


def copied_share(token_ids: Sequence[int], source: Sequence[int]) -> float:
    """Return the share of tokens that stand in a run of the source's, of four or more."""
    starts = range(len(source) - _RUN_TOKENS + 1)
    known = {tuple(source[start : start + _RUN_TOKENS]) for start in starts}
    copied: set[int] = set()
    for start in range(len(token_ids) - _RUN_TOKENS + 1):
        if tuple(token_ids[start : start + _RUN_TOKENS]) in known:
            copied.update(range(start, start + _RUN_TOKENS))
    return len(copied) / len(token_ids) if token_ids else 0.0


def _part_list(num_rows: int) -> str:
    draw = random.Random(5)
    return "\n".join(
        f"{row}. {name}, part {draw.randint(1000, 9999)}-{draw.choice('ABCDEFG')}, "
        f"{draw.randint(2, 48)} pieces, shelf {draw.randint(1, 90)}"
        for row, name in enumerate(_PARTS[:num_rows], start=1)
    )
