"""The values that documents, searches and answers are made of, free of storage, tensors and HTTP.

Character offsets are into `Document.text`, the stored text of one document version; ends are
exclusive.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.request import DraftMode, EngineInfo, Timings, Usage

DEFAULT_COLLECTION = "default"


@dataclass(frozen=True, slots=True)
class Scope:
    """The collections that a caller may see; every method on stored things takes it first.

    What lies outside a scope is `NotFound`, the same as what does not exist.
    """

    collection_ids: frozenset[str]

    def __contains__(self, collection_id: str) -> bool:
        return collection_id in self.collection_ids


class DocumentState(StrEnum):
    """Where a document is on its way; nothing is `ready` with zero text.

    One that is `prefilling` is ready, or ready in part, and is being read beforehand.
    """

    QUEUED = "queued"
    PARSING = "parsing"
    EMBEDDING = "embedding"
    PREFILLING = "prefilling"
    READY = "ready"
    PARTIAL = "partial"
    FAILED = "failed"
    DELETING = "deleting"

    @property
    def is_searchable(self) -> bool:
        """Whether its text can be found and quoted."""
        return self in {DocumentState.READY, DocumentState.PARTIAL, DocumentState.PREFILLING}


class JobKind(StrEnum):
    """What a job does with a document: make it searchable, or have the model read it."""

    INGEST = "ingest"
    PREFILL = "prefill"


class JobState(StrEnum):
    """Where a job is; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self in {JobState.DONE, JobState.FAILED, JobState.CANCELLED}


class DuplicatePolicy(StrEnum):
    """What to do with bytes that the collection already holds."""

    REUSE = "reuse"
    REPLACE = "replace"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class DocumentRecord:
    """One document as the catalogue knows it.

    Attributes:
        sha256: Of the original bytes; with `parser` it identifies the version.
        pages: Physical pages; 1 for formats without pages.
        tokens: Tokens of the text in the loaded model's tokenizer; 0 while unknown.
        reason: One word why it `failed` (`encrypted`, `no_text`, `empty`, …), or why the work on it
            rests (`store_unavailable`, `storage_error`).
        warnings: What could not be read, page by page, or was guessed.
        source_id: Stands for this version in prompts, caches and citations.
    """

    id: str
    collection_id: str
    name: str
    state: DocumentState
    media_type: str
    size_bytes: int
    sha256: str
    parser: str
    pages: int
    chunks: int
    characters: int
    tokens: int
    created_ms: int
    reason: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def source_id(self) -> str:
        """Same as the id: a new version is a new document."""
        return self.id


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One piece of background work on a document.

    Attributes:
        stage: `parsing` or `embedding` while it runs; `reading` of a prefill.
        done: Pages, chunks or tokens done in this stage, of `total`.
        code: Error code when it failed, or was put off.
        detail: What went wrong and what to do.
        retry_at_ms: When a job that was put off is tried again, in ms since 1970.
    """

    id: str
    collection_id: str
    document_id: str
    state: JobState
    stage: str
    done: int
    total: int
    created_ms: int
    code: str | None = None
    detail: str | None = None
    retry_at_ms: int | None = None
    kind: JobKind = JobKind.INGEST


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A retrievable passage; `text` equals the document's text at `start:end`."""

    document_id: str
    index: int
    start: int
    end: int
    text: str
    page_start: int
    page_end: int
    section: str | None


class SearchMode(StrEnum):
    """Which legs of retrieval run."""

    HYBRID = "hybrid"
    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A passage and why it was found.

    Attributes:
        score: Reciprocal-rank fusion over the legs that found it (larger is better, comparable
            within one query).
        dense_score: Cosine similarity, when the dense leg found it.
        sparse_score: Sum of IDF-weighted term matches, when the sparse leg found it.
        exact: A query term with a digit or an identifier of the query occurs in it as written.
    """

    chunk: ChunkRecord
    document_name: str
    score: float
    dense_score: float | None
    sparse_score: float | None
    exact: bool = False


class AskMode(StrEnum):
    """How the context of an answer is chosen."""

    AUTO = "auto"
    FULL = "full"
    RETRIEVE = "retrieve"


class QuoteMode(StrEnum):
    """How the quotes of a model are made: copies by construction, or written and looked up."""

    CONSTRAINED = "constrained"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class AskRequest:
    """A question over documents.

    Attributes:
        document_ids: `None` asks over everything in scope.
        max_quotes: At most that many citations leave.
        max_tokens: Of the written answer.
        use_engine: `False` answers with the best retrieved sentence and no model.
        draft: Who may propose tokens; the answer is the same.
        draft_tokens: At most that many in a step; `None` leaves it to the drafter.
        quoting: An engine that cannot constrain quotes writes them freely, and the answer says so.
    """

    question: str
    document_ids: tuple[str, ...] | None = None
    mode: AskMode = AskMode.AUTO
    max_quotes: int = 3
    max_tokens: int = 96
    use_engine: bool = True
    draft: DraftMode = DraftMode.AUTO
    draft_tokens: int | None = None
    quoting: QuoteMode = QuoteMode.CONSTRAINED


@dataclass(frozen=True, slots=True)
class PageBox:
    """A line of a quote on its page: points from the page's top-left corner."""

    page: int
    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True, slots=True)
class PageRange:
    """The part of a quote on one page; characters count from the page's first."""

    page: int
    label: str | None
    start: int
    end: int


class QuoteMatch(StrEnum):
    """How a quote was found; only the first two may leave as citations."""

    EXACT = "exact"
    NORMALISED = "normalised"
    ELSEWHERE = "elsewhere"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True)
class Citation:
    """A quote that code has found in the stored source.

    Attributes:
        n: 1-based number, as in `[n]` of the answer.
        quote: The source's own characters at `start:end`.
        page_start: First physical page, 1-based.
        page_label: As printed on the first page, when the file says so.
        version_sha256: Of the document's original bytes.
        pages: One entry a page that the quote touches.
        boxes: One a line, empty for formats without a layout.
    """

    n: int
    document_id: str
    document_name: str
    version_sha256: str
    quote: str
    start: int
    end: int
    page_start: int
    page_end: int
    page_label: str | None
    section: str | None
    match: QuoteMatch
    pages: tuple[PageRange, ...] = ()
    boxes: tuple[PageBox, ...] = ()


@dataclass(frozen=True, slots=True)
class AskTimings:
    """Milliseconds by stage; `engine` sums the engine's requests of this answer."""

    retrieve_ms: float
    rerank_ms: float
    total_ms: float
    ttft_ms: float | None
    engine: Timings | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The final object of an ask, the same streamed or not.

    Attributes:
        answered: Whether the documents support an answer; without a verified quote it is `False`.
        answer: Text with `[n]` marks; says so when nothing was found.
        mode: The mode that ran, never `auto`.
        mode_reason: Why that mode.
        context: `single`, `bundle` or `retrieved`.
        dropped_quotes: Quotes that were not found in the source and so did not leave.
        quoting: How the model's quotes were made; `None` when no model wrote.
        degraded: What was asked of the engine and could not be honoured.
        cache_tier: Where what was not computed again was: `device`, `file` or `none`.
        miss_reason: Why something that is kept of prompts was computed; `None` when nothing was.
        miss_field: What differs where the reason is that something else was computed.
    """

    id: str
    question: str
    answered: bool
    answer: str
    citations: tuple[Citation, ...]
    mode: AskMode
    mode_reason: str
    context: str
    usage: Usage
    timings: AskTimings
    engine: EngineInfo | None
    dropped_quotes: int = 0
    quoting: QuoteMode | None = None
    degraded: tuple[str, ...] = ()
    cache_tier: CacheTier = CacheTier.NONE
    miss_reason: CacheMiss | None = None
    miss_field: str | None = None


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Progress; `stage` is `retrieving`, `reranking`, `reading` or `answering`."""

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class AskSources:
    """The passages (or whole documents) that the answer is looked for in."""

    hits: tuple[SearchHit, ...]
    document_ids: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New answer text; all deltas joined are `Answer.answer`."""

    text: str


@dataclass(frozen=True, slots=True)
class CitationFound:
    """Sent once a quote is verified."""

    citation: Citation


AskEvent = AskStatus | AskSources | AnswerDelta | CitationFound | Answer
