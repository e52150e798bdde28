"""Puts a prompt together: rules → documents → conversation → question.

The document part is a list of spans, so that every character of it can be traced to its source.
What
changes from ask to ask stands behind the documents, so that what was read of them can be reused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ragflash.engine.client import EngineClient
from ragflash.engine.request import ChatMessage, SegmentKind, Span, TextSegment
from ragflash.rag.library import Library
from ragflash.rag.records import DocumentRecord
from ragflash.speculative.lookup import SourceIndex
from ragflash_ingest.document import Document
from ragflash_prompts import load


@dataclass(frozen=True, slots=True)
class ContextPart:
    """What one document contributes.

    Attributes:
        ranges: Character ranges in reading order; `None` is the whole document.
    """

    record: DocumentRecord
    document: Document
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def shown(self) -> tuple[tuple[int, int], ...]:
        """The ranges that the model gets to read."""
        return self.ranges if self.ranges is not None else ((0, len(self.document.text)),)


def build_messages(
    parts: Sequence[ContextPart], question: str, *, mark: str
) -> tuple[ChatMessage, ...]:
    """Make the chat messages of an ask.

    Args:
        parts: Whole documents become a segment each, passages of all documents one together.
        question: As the user wrote it.
        mark: Unguessable text that fences the documents; it stands behind them.
    """
    whole = [_document_segment(part) for part in parts if part.ranges is None]
    cut = [part for part in parts if part.ranges is not None]
    passages = [_passages_segment(cut)] if cut else []
    asked = load("question").render(mark=mark, question=question).rstrip()
    return (
        _rules(),
        ChatMessage("user", (*whole, *passages, TextSegment(SegmentKind.QUESTION, asked))),
    )


def document_messages(part: ContextPart) -> tuple[ChatMessage, ChatMessage]:
    """Make what every conversation about a whole document begins with: rules, and the document."""
    return _rules(), ChatMessage("user", (_document_segment(part),))


def copied_from(
    library: Library, engine: EngineClient, parts: Sequence[ContextPart]
) -> tuple[tuple[str, SourceIndex], ...]:
    """Return what drafts of an answer are copied from: the whole of each document; blocks."""
    cutter = engine.lookup_tokenizer
    if cutter is None:
        return ()
    found = ((part, library.lookup_index(part.record, part.document, cutter)) for part in parts)
    return tuple((part.record.source_id, index) for part, index in found if index is not None)


def _rules() -> ChatMessage:
    return ChatMessage("system", (TextSegment(SegmentKind.RULES, load("rules").render().strip()),))


def _document_segment(part: ContextPart) -> TextSegment:
    head = load("document_head").render(name=part.record.name)
    text = part.document.text
    span = Span(part.record.source_id, 0, len(head), len(text))
    return TextSegment(SegmentKind.DOCUMENT, head + text + "\n", (span,))


def _passages_segment(parts: Sequence[ContextPart]) -> TextSegment:
    text, spans = "", []
    for part in parts:
        for start, end in part.shown:
            page = part.document.page_at(start).number
            text += load("passage_head").render(name=part.record.name, page=str(page))
            spans.append(Span(part.record.source_id, start, len(text), end - start))
            text += part.document.text[start:end] + "\n\n"
    return TextSegment(SegmentKind.PASSAGES, text, tuple(spans))
