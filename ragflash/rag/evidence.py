"""Weighs the sentences of retrieved passages as evidence for a question.

A sentence's weight combines how close it and its passage are to the question (cosine of
embeddings),
how much of the question's wording it covers (IDF-weighted), and, once the model has read it, how
much
likelier it makes the question. `docs/retrieval.md` tells how the weights were found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ragflash.rag.library import Library
from ragflash.rag.quotes import is_quotable
from ragflash.rag.records import DocumentRecord, Scope, SearchHit
from ragflash_ingest.document import Document
from ragflash_ingest.sentences import sentences

_MAX_SENTENCE_CHARACTERS = 700
_WINDOW_CHARACTERS = 320
_SENTENCE_COSINE, _PASSAGE_COSINE, _SENTENCE_COVERAGE, _PASSAGE_COVERAGE = 1.0, 0.5, 0.3, 0.3
_LIKELIHOOD = 0.25
_MIN_PRIOR, _MIN_READ = 0.9, 1.2
_KEEP_WITHIN = 0.35


@dataclass(frozen=True, slots=True)
class Evidence:
    """A sentence that may answer the question, and the passage it stands in.

    Attributes:
        start: The sentence in the document's text.
        window_start: The sentence with its neighbours: what the model reads to judge it.
        passage_start: The retrieved chunk.
        prior: Weight before the model has read it.
        gain: How much likelier the question is after the window than without it, nats a token;
            `None` before the model has read it.
    """

    record: DocumentRecord
    document: Document
    start: int
    end: int
    window_start: int
    window_end: int
    passage_start: int
    passage_end: int
    prior: float
    gain: float | None = None

    @property
    def score(self) -> float:
        """Weight with everything known."""
        return self.prior + (_LIKELIHOOD * self.gain if self.gain is not None else 0.0)

    @property
    def window(self) -> str:
        """What the model reads to judge the sentence, headed by its section."""
        path = self.document.section_path(self.start)
        head = f"{path[-1]}\n" if path else ""
        return head + self.document.text[self.window_start : self.window_end]


@dataclass(frozen=True, slots=True)
class _Candidate:
    hit: SearchHit
    record: DocumentRecord
    document: Document
    start: int
    end: int
    window_start: int
    window_end: int


def gather(
    library: Library, scope: Scope, question: str, hits: Sequence[SearchHit]
) -> list[Evidence]:
    """Weigh all sentences of the hits, best first; blocks on the embedding model."""
    candidates = _candidates(library, scope, hits)
    if not candidates:
        return []
    vectors = library.embed_texts(
        [question, *(c.document.text[c.start : c.end] for c in candidates)]
    )
    cosines = vectors[1:] @ vectors[0]
    wanted = library.term_weights(question)
    evidence = []
    for candidate, cosine in zip(candidates, cosines, strict=True):
        chunk = candidate.hit.chunk
        sentence = candidate.document.text[candidate.start : candidate.end]
        headed = f"{chunk.section or ''}\n{chunk.text}"
        prior = (
            _SENTENCE_COSINE * float(cosine)
            + _PASSAGE_COSINE * (candidate.hit.dense_score or 0.0)
            + _SENTENCE_COVERAGE * _coverage(wanted, library.term_weights(sentence))
            + _PASSAGE_COVERAGE * _coverage(wanted, library.term_weights(headed))
        )
        evidence.append(_evidence(candidate, prior))
    return sorted(evidence, key=lambda item: -item.prior)


def select(evidence: Sequence[Evidence], limit: int) -> list[Evidence]:
    """Keep what supports an answer: at most `limit` sentences, best first, or none at all."""
    ranked = sorted(evidence, key=lambda item: -item.score)
    if not ranked:
        return []
    floor = _MIN_PRIOR if ranked[0].gain is None else _MIN_READ
    if ranked[0].score < floor:
        return []
    kept = [item for item in ranked if item.score >= ranked[0].score - _KEEP_WITHIN]
    return kept[:limit]


def with_gain(evidence: Evidence, gain: float) -> Evidence:
    """Return the evidence as read by the model."""
    return replace(evidence, gain=gain)


def _evidence(candidate: _Candidate, prior: float) -> Evidence:
    return Evidence(
        record=candidate.record,
        document=candidate.document,
        start=candidate.start,
        end=candidate.end,
        window_start=candidate.window_start,
        window_end=candidate.window_end,
        passage_start=candidate.hit.chunk.start,
        passage_end=candidate.hit.chunk.end,
        prior=prior,
    )


def _candidates(library: Library, scope: Scope, hits: Sequence[SearchHit]) -> list[_Candidate]:
    """List the sentences of the hits, each once, under its best hit."""
    found: dict[tuple[str, int], _Candidate] = {}
    by_document = groupby(
        sorted(hits, key=lambda hit: (hit.chunk.document_id, -hit.score)),
        key=lambda hit: hit.chunk.document_id,
    )
    for document_id, group in by_document:
        record = library.get(scope, document_id)
        document = library.document(scope, document_id)
        for hit in group:
            for candidate in _sentences_of(hit, record, document):
                found.setdefault((document_id, candidate.start), candidate)
    return list(found.values())


def _sentences_of(
    hit: SearchHit, record: DocumentRecord, document: Document
) -> list[_Candidate]:
    first, last = hit.chunk.start, hit.chunk.end
    skip = [
        (max(start, first) - first, min(end, last) - first)
        for start, end in document.furniture
        if start < last and end > first
    ]
    ranges = [
        (first + start, first + end)
        for start, end in sentences(document.text[first:last], skip=skip)
    ]
    candidates = []
    for index, (start, end) in enumerate(ranges):
        long = end - start > _MAX_SENTENCE_CHARACTERS
        if long or not is_quotable(document.text, start, end):
            continue
        window = _window(ranges, index)
        candidates.append(_Candidate(hit, record, document, start, end, *window))
    return candidates


def _window(ranges: Sequence[tuple[int, int]], index: int) -> tuple[int, int]:
    """Grow a sentence by its neighbours, the one before first, up to a number of characters."""
    start, end = ranges[index]
    before, after = index - 1, index + 1
    while True:
        if before >= 0 and end - ranges[before][0] <= _WINDOW_CHARACTERS:
            start, before = ranges[before][0], before - 1
        elif after < len(ranges) and ranges[after][1] - start <= _WINDOW_CHARACTERS:
            end, after = ranges[after][1], after + 1
        else:
            return start, end


def _coverage(wanted: dict[int, float], offered: dict[int, float]) -> float:
    total = sum(wanted.values())
    return sum(w for term, w in wanted.items() if term in offered) / total if total else 0.0
