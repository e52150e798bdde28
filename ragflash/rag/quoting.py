"""What the model may quote, and which of it may be cited.

Constrained, the model begins with one of the chosen sentences, copied by construction, and whatever
it puts between quote marks after that is copied from the same documents. Free, it writes what it
likes, and a quote is used if it is found.
"""

from collections.abc import Sequence

from ragflash.engine.client import EngineClient
from ragflash.engine.constraint import (
    Constraint,
    ConstraintKind,
    Free,
    Literal,
    QuoteFrom,
    Quoting,
)
from ragflash.engine.request import EngineInfo, Finished, QuoteSpan
from ragflash.rag.evidence import Evidence
from ragflash.rag.quotes import is_quotable, locate
from ragflash.rag.records import AskRequest, DocumentRecord, QuoteMode
from ragflash_ingest.document import Document

QUOTE_MAX_TOKENS = 240
_MARK, _OPEN, _CLOSE = '"', '"', '"\n'

Quoted = tuple[DocumentRecord, Document, int, int]


def choose_mode(request: AskRequest, engine: EngineInfo) -> tuple[QuoteMode, tuple[str, ...]]:
    """Return how quotes are made, and what was asked for and the engine cannot do."""
    if request.quoting is QuoteMode.FREE or ConstraintKind.QUOTE_FROM in engine.constraints:
        return request.quoting, ()
    return QuoteMode.FREE, (ConstraintKind.QUOTE_FROM,)


def constraint(
    mode: QuoteMode, evidence: Sequence[Evidence], request: AskRequest, engine: EngineClient
) -> Constraint:
    """Hold the output to a quote, a line break, and one line of answer."""
    if mode is QuoteMode.FREE:
        quote = Free(until=_MARK, max_tokens=QUOTE_MAX_TOKENS)
        return (Literal(_OPEN), quote, Literal("\n"), Free("\n", request.max_tokens))
    source_ids = tuple(dict.fromkeys(item.record.source_id for item in evidence))
    sentence = QuoteFrom(
        source_ids,
        min_words=1,
        max_characters=_max_characters(evidence, engine),
        ranges=tuple((item.record.source_id, item.start, item.end) for item in evidence),
    )
    written = Quoting(
        QuoteFrom(source_ids),
        opening=_MARK,
        closing=_MARK,
        max_quotes=request.max_quotes - 1,
        until="\n",
        max_tokens=request.max_tokens,
    )
    return (Literal(_OPEN), sentence, Literal(_CLOSE), written)


def split(mode: QuoteMode, finished: Finished) -> tuple[str, str]:
    """Return the quote that the output begins with, and what is written behind it."""
    text = finished.text.removeprefix(_OPEN)
    if mode is QuoteMode.CONSTRAINED and finished.quotes:
        end = finished.quotes[0].end
        return finished.text[len(_OPEN) : end], finished.text[end:].partition(_CLOSE)[2]
    quote, _, written = text.partition(_MARK)
    return quote, written.lstrip("\n")


def find_quotes(
    mode: QuoteMode, finished: Finished, evidence: Sequence[Evidence]
) -> tuple[list[Quoted], int]:
    """List what may be cited: the model's quote, the chosen sentences, and its other quotes.

    Returns:
        Them, and the number of quotes that may not.
    """
    chosen = [(item.record, item.document, item.start, item.end) for item in evidence]
    if mode is QuoteMode.FREE:
        first = _found(split(mode, finished)[0], evidence)
        return ([] if first is None else [first]) + chosen, int(first is None)
    first_quotes, others = finished.quotes[:1], finished.quotes[1:]
    leading = [quoted for span in first_quotes if (quoted := _of_sentences(evidence, span))]
    documents = {item.record.source_id: (item.record, item.document) for item in evidence}
    behind = [(*documents[span.source_id], span.source_start, span.source_end) for span in others]
    return leading + chosen + behind, len(first_quotes) - len(leading)


def _max_characters(evidence: Sequence[Evidence], engine: EngineClient) -> int:
    """Return how much of this text fits into the tokens that a quote may have."""
    text = "".join(item.text for item in evidence)
    return max(1, QUOTE_MAX_TOKENS * len(text) // max(1, len(engine.tokenize(text))))


def _found(quote: str, evidence: Sequence[Evidence]) -> Quoted | None:
    """Find a quote that was written freely in the documents of the evidence, best first."""
    for item in evidence:
        found = locate(quote, item.document.text, near=item.start)
        if found is not None and is_quotable(item.document.text, found[1], found[2]):
            return item.record, item.document, found[1], found[2]
    return None


def _of_sentences(evidence: Sequence[Evidence], span: QuoteSpan) -> Quoted | None:
    """Return a quote that starts in one of the chosen sentences and ends in that or another."""
    own = [item for item in evidence if item.record.source_id == span.source_id]
    if not any(item.start < span.source_end <= item.end for item in own):
        return None
    for item in own:
        if item.start <= span.source_start < item.end:
            return item.record, item.document, span.source_start, span.source_end
    return None
