"""Weighs the sentences of retrieved passages as evidence, and tells when there is none.

Weight: cosines of sentence, window and passage with the question; the share of the question's words
that they hold; how well each of its words is met by one in the window (late interaction: Khattab
and Zaharia, "ColBERT", SIGIR 2020); whether the kind of thing asked for is there; and, once the
model has read the window, how much likelier the question has become. What comes of vectors counts
as far as the embedding model can be trusted with the question. `docs/retrieval.md` tells how the
constants were found and what they achieve.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ragflash.rag.answer_type import AnswerType, expected, holds, holds_words, names
from ragflash.rag.embed import TokenVectors
from ragflash.rag.language import DIGITS, asks_in_english, reads_as_english
from ragflash.rag.library import Library
from ragflash.rag.quotes import is_quotable
from ragflash.rag.records import DocumentRecord, Scope, SearchHit
from ragflash.rag.sparse import document_vector
from ragflash_ingest.document import Document
from ragflash_ingest.normalise import normalise
from ragflash_ingest.sentences import sentences

MAX_SENTENCE_CHARACTERS = 700
WINDOW_CHARACTERS = 320
# Sentences whose windows are embedded.
WINDOWS = 24

_SENTENCE, _WINDOW, _PASSAGE = 1.0, 0.5, 0.5
_SENTENCE_WORDS, _PASSAGE_WORDS = 0.3, 0.3
_WORDS_MET, _KIND, _GAIN = 0.5, 0.1, 0.3
_KEEP_WITHIN = 0.3
_MIN_WORST_WORD = 0.24
_MIN_HELD = 0.15

_UNASKED_WORDS = """
    a an the of to in on for and or is are was were be been do does did can could may might must
    should will would what which who whom when where why how many much i me my you it its this that
    these those there with by from at as if into than then so not no one any some has have had get
    ? . , ' s
"""
_UNASKED = frozenset(_UNASKED_WORDS.split())


@dataclass(frozen=True, slots=True)
class Evidence:
    """A sentence that may answer the question, and the passage it stands in.

    Attributes:
        start: The sentence in the document's text.
        window_start: The sentence with its neighbours: what the model reads to judge it.
        passage_start: The retrieved chunk.
        weight: Before the model has read it.
        worst_word: How well the question's least met word is met in the window, a cosine; 1 when
            that cannot be judged, since the question is not English.
        kind: Of thing asked for.
        is_kind: Whether the sentence holds one.
        has_names: Whether the passage, its heading or its document holds every name asked about.
        held: Share of the question's words in the passage; 1 when vectors tell more.
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
    weight: float
    worst_word: float
    kind: AnswerType
    is_kind: bool
    has_names: bool
    held: float = 1.0
    gain: float | None = None

    @property
    def score(self) -> float:
        """Weight with everything known."""
        return self.weight + (_GAIN * self.gain if self.gain is not None else 0.0)

    @property
    def text(self) -> str:
        """The sentence."""
        return self.document.text[self.start : self.end]

    @property
    def window(self) -> str:
        """The sentence with its neighbours."""
        return self.document.text[self.window_start : self.window_end]


@dataclass(frozen=True, slots=True)
class _Candidate:
    hit: SearchHit
    record: DocumentRecord
    document: Document
    start: int
    end: int
    window_start: int
    window_end: int
    weight: float = 0.0

    @property
    def text(self) -> str:
        return self.document.text[self.start : self.end]

    @property
    def window(self) -> str:
        return self.document.text[self.window_start : self.window_end]

    @property
    def surroundings(self) -> str:
        """Passage, heading and document name, in lower case: where a name may stand."""
        chunk = self.hit.chunk
        text = normalise(f"{chunk.section or ''}\n{chunk.text}").text
        return f"{self.record.name}\n{text}".lower().translate(DIGITS)


def gather(
    library: Library, scope: Scope, question: str, hits: Sequence[SearchHit]
) -> list[Evidence]:
    """Weigh the sentences of the hits, best first; blocks on the embedding model."""
    candidates = _candidates(library, scope, hits)
    if not candidates:
        return []
    vectors = library.embed_texts([question, *(candidate.text for candidate in candidates)])
    wanted, trust = library.term_weights(question), library.trust(question)
    weighed = [
        replace(
            candidate,
            weight=_SENTENCE * trust * float(cosine) + _passage_weight(candidate, wanted, trust),
        )
        for candidate, cosine in zip(candidates, vectors[1:] @ vectors[0], strict=True)
    ]
    best = sorted(weighed, key=lambda candidate: -candidate.weight)[:WINDOWS]
    asked, *windows = library.embed_tokens([question, *(candidate.window for candidate in best)])
    asked_for = expected(question)
    asked_names, in_english = names(question), asks_in_english(question)
    evidence: list[Evidence] = []
    for candidate, window in zip(best, windows, strict=True):
        met = _words_met(asked, window)
        is_kind = holds(asked_for, candidate.text) or not reads_as_english(candidate.hit.chunk.text)
        near = _WINDOW * float(vectors[0] @ _mean(window.vectors)) + _WORDS_MET * float(met.mean())
        weight = candidate.weight + trust * near
        if not is_kind and asked_for.kind is not AnswerType.REASON:  # may stand in a neighbour
            weight -= _KIND
        evidence.append(
            Evidence(
                record=candidate.record,
                document=candidate.document,
                start=candidate.start,
                end=candidate.end,
                window_start=candidate.window_start,
                window_end=candidate.window_end,
                passage_start=candidate.hit.chunk.start,
                passage_end=candidate.hit.chunk.end,
                weight=weight,
                worst_word=float(met.min()) if in_english else 1.0,
                kind=asked_for.kind,
                is_kind=is_kind,
                has_names=holds_words(candidate.surroundings, asked_names),
                held=_coverage(wanted, candidate.hit.chunk.text) if trust < 1 else 1.0,
            )
        )
    return sorted(evidence, key=lambda item: -item.weight)


def select(evidence: Sequence[Evidence], limit: int) -> list[Evidence]:
    """Keep what supports an answer: at most `limit` sentences, best first, or none at all.

    There is no answer when the best sentence lacks the kind of thing asked for (a reason may stand
    in any of them), when no passage holds the names asked about, when every window leaves some
    word of the question unmet, or, where vectors tell little, when no passage holds a fair share of
    its words. How close the texts are says little: questions that a document
    nearly answers are the closest of all.
    """
    ranked = sorted(evidence, key=lambda item: -item.score)[:limit]
    if not ranked or not any(item.has_names for item in ranked):
        return []
    deciding = ranked if ranked[0].kind is AnswerType.REASON else ranked[:1]
    if not any(item.is_kind for item in deciding):
        return []
    if max(item.worst_word for item in ranked) < _MIN_WORST_WORD:
        return []
    if max(item.held for item in ranked) < _MIN_HELD:
        return []
    return [item for item in ranked if item.score >= ranked[0].score - _KEEP_WITHIN]


def with_gain(evidence: Evidence, gain: float) -> Evidence:
    """Return the evidence as read by the model."""
    return replace(evidence, gain=gain)


def _passage_weight(candidate: _Candidate, wanted: dict[int, float], trust: float) -> float:
    chunk = candidate.hit.chunk
    return (
        _PASSAGE * trust * (candidate.hit.dense_score or 0.0)
        + _SENTENCE_WORDS * _coverage(wanted, candidate.text)
        + _PASSAGE_WORDS * _coverage(wanted, chunk.text)
    )


def _coverage(wanted: dict[int, float], text: str) -> float:
    """Share of the question's weight whose terms a text holds."""
    offered = document_vector(text).keys()
    total = sum(wanted.values())
    return sum(w for term, w in wanted.items() if term in offered) / total if total else 0.0


def _words_met(asked: TokenVectors, window: TokenVectors) -> npt.NDArray[np.float32]:
    """For each word of the question that carries meaning, its best cosine in the window."""
    rows = [at for at, token in enumerate(asked.tokens) if token.casefold() not in _UNASKED]
    if not asked.tokens or not window.tokens:
        return np.zeros(1, np.float32)
    met: npt.NDArray[np.float32] = (asked.vectors[rows or slice(None)] @ window.vectors.T).max(1)
    return met


def _mean(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    mean = vectors.sum(0)
    unit: npt.NDArray[np.float32] = mean / max(float(np.linalg.norm(mean)), 1e-12)
    return unit


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


def _sentences_of(hit: SearchHit, record: DocumentRecord, document: Document) -> list[_Candidate]:
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
    return [
        _Candidate(hit, record, document, start, end, *_window(ranges, index))
        for index, (start, end) in enumerate(ranges)
        if end - start <= MAX_SENTENCE_CHARACTERS and is_quotable(document.text, start, end)
    ]


def _window(ranges: Sequence[tuple[int, int]], index: int) -> tuple[int, int]:
    """Grow a sentence by its neighbours, the one before first, up to a number of characters."""
    start, end = ranges[index]
    before, after = index - 1, index + 1
    while True:
        if before >= 0 and end - ranges[before][0] <= WINDOW_CHARACTERS:
            start, before = ranges[before][0], before - 1
        elif after < len(ranges) and ranges[after][1] - start <= WINDOW_CHARACTERS:
            end, after = ranges[after][1], after + 1
        else:
            return start, end
