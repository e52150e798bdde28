"""Bodies of the native routes; the command line prints the same objects.

Unknown keys are refused, so that a misspelt option is not an option ignored. Replies are read off
the records (`Reply.of`); an alias says where a name of ours differs from the record's.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    computed_field,
)

from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.request import MAX_DRAFT, DraftMode
from ragflash.rag.records import (
    AskMode,
    AskRequest,
    AskTimings,
    QuoteMatch,
    QuoteMode,
    SearchMode,
)

_UNQUANTISED = frozenset({"float32", "float16", "bfloat16"})


def encodable(text: str) -> str:
    """Return the text; JSON can spell half a surrogate pair, which nothing behind here can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text holds half of a surrogate pair, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(encodable)]
DocumentIds = Annotated[list[Text], Field(max_length=1000)]
DraftModeField = Annotated[
    DraftMode,
    Field(
        description="Who may propose tokens, which changes speed alone: `auto` whoever is worth "
        "it, `lookup` and `tree` documents and output, `mtp` the model, `dflash` its drafter."
    ),
]
DraftTokens = Annotated[
    int | None, Field(ge=1, le=MAX_DRAFT, description="Most of them in a step; `null`: no limit.")
]


class Body(BaseModel):
    """What a client sends to a native route."""

    model_config = ConfigDict(extra="forbid")


class Reply(BaseModel):
    """What a route answers."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    @classmethod
    def of(cls, record: object) -> Self:
        """Read the fields off a record's attributes."""
        return cls.model_validate(record)


class SearchBody(Body):
    """A query; `documents` are ids, left out for all."""

    query: Text
    documents: DocumentIds | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 10
    mode: SearchMode = SearchMode.HYBRID


class AskBody(Body):
    """A question; `documents` are ids, left out for all."""

    question: Text
    documents: DocumentIds | None = None
    mode: AskMode = AskMode.AUTO
    max_quotes: Annotated[int, Field(ge=1, le=20)] = 3
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 96
    use_engine: bool = True
    draft: DraftModeField = DraftMode.AUTO
    draft_tokens: DraftTokens = None
    quoting: QuoteMode = QuoteMode.CONSTRAINED
    stream: bool = False

    def request(self) -> AskRequest:
        """Give what the answerer takes."""
        return AskRequest(
            question=self.question,
            document_ids=None if self.documents is None else tuple(self.documents),
            mode=self.mode,
            max_quotes=self.max_quotes,
            max_tokens=self.max_tokens,
            use_engine=self.use_engine,
            draft=self.draft,
            draft_tokens=self.draft_tokens,
            quoting=self.quoting,
        )


class HitOut(Reply):
    """A passage and why it was found."""

    document: str = Field(validation_alias=AliasPath("chunk", "document_id"))
    document_name: str
    index: int = Field(validation_alias=AliasPath("chunk", "index"))
    text: str = Field(validation_alias=AliasPath("chunk", "text"))
    start: int = Field(validation_alias=AliasPath("chunk", "start"))
    end: int = Field(validation_alias=AliasPath("chunk", "end"))
    page: int = Field(validation_alias=AliasPath("chunk", "page_start"))
    page_end: int = Field(validation_alias=AliasPath("chunk", "page_end"))
    section: str | None = Field(validation_alias=AliasPath("chunk", "section"))
    score: float
    dense_score: float | None
    sparse_score: float | None
    exact: bool


class SearchOut(Reply):
    """Hits, best first."""

    object: Literal["list"] = "list"
    query: str
    mode: SearchMode
    data: tuple[HitOut, ...]


class PageRangeOut(Reply):
    """The part of a quote on one page; characters count from the page's first."""

    page: int
    label: str | None
    start: int
    end: int


class BoxOut(Reply):
    """A line of a quote, in points from the page's top-left corner."""

    page: int
    x0: float
    y0: float
    x1: float
    y1: float


class CitationOut(Reply):
    """A quote that was found in the stored text: `text[start:end] == quote`."""

    n: int
    document: str = Field(validation_alias="document_id")
    document_name: str
    version_sha256: str
    quote: str
    match: QuoteMatch
    start: int
    end: int
    page: int = Field(validation_alias="page_start")
    page_end: int
    page_label: str | None
    section: str | None
    pages: tuple[PageRangeOut, ...]
    boxes: tuple[BoxOut, ...]


class UsageOut(Reply):
    """Token counts; `cached_tokens` are those of the prompt that were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


Rounded = Annotated[float, AfterValidator(lambda value: round(value, 3))]


class DraftsOut(Reply):
    """Tokens that a source drafted: `lookup` is documents, `lookup_output` what was written."""

    source: str
    drafted: int
    accepted: int


class EngineTimingsOut(Reply):
    """Where the engine's time went; `restore_ms`, spent on files, is part of `prompt_ms`."""

    queue_ms: Rounded = 0.0
    prompt_n: int = 0
    cache_n: int = 0
    prompt_ms: Rounded = 0.0
    predicted_n: int = 0
    predicted_ms: Rounded = 0.0
    predicted_per_second: Rounded = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    drafts: tuple[DraftsOut, ...] = ()
    draft_idle: Annotated[
        dict[str, int],
        BeforeValidator(dict),
        Field(
            validation_alias=AliasChoices("idle_steps", "draft_idle"),
            description="Steps without a draft by reason, as `nothing_found` or `no_gain`.",
        ),
    ] = {}
    restore_ms: Rounded = 0.0
    restore_gb_s: Rounded = 0.0
    ttft_ms: Rounded | None = None


class AskTimingsOut(EngineTimingsOut):
    """Where an answer's time went; the engine's part is zero when it was not used."""

    retrieve_ms: Rounded
    rerank_ms: Rounded
    total_ms: Rounded

    @classmethod
    def of_ask(cls, timings: AskTimings) -> Self:
        """Lay the engine's timings beside those of the other stages."""
        engine = EngineTimingsOut.of(timings.engine) if timings.engine else EngineTimingsOut()
        fields = engine.model_dump() | {
            "ttft_ms": timings.ttft_ms,
            "retrieve_ms": timings.retrieve_ms,
            "rerank_ms": timings.rerank_ms,
            "total_ms": timings.total_ms,
        }
        return cls(**fields)


class EngineOut(Reply):
    """What made a reply."""

    model: str
    model_hash: str
    architecture: str
    weights: str
    compute_dtype: str
    kv_format: str
    context_tokens: int
    device: str
    template: str = Field(
        description="Where the chat template comes from: `model file`, or `built-in` and a family."
    )
    lossless: Literal[True] = Field(True, description="Drafting never changes the output.")

    @computed_field(description="The cache is quantised, which changes the output a little.")  # type: ignore[prop-decorator]
    @property
    def lossy(self) -> bool:
        """Whether the cache is quantised."""
        return self.kv_format not in _UNQUANTISED


class AnswerOut(Reply):
    """The answer to a question, the same streamed or not."""

    object: Literal["answer"] = "answer"
    id: str
    question: str
    answered: bool
    answer: str
    citations: tuple[CitationOut, ...]
    dropped_quotes: int
    mode: AskMode
    mode_reason: str
    context: str
    quoting: QuoteMode | None = Field(
        description="How the model's quotes were made; `null` if no model wrote."
    )
    degraded: tuple[str, ...]
    cache_tier: CacheTier = Field(description="Where `usage.cached_tokens` were.")
    miss_reason: CacheMiss | None = Field(
        description="Why text that is kept for later had to be computed; `null` if none had to be."
    )
    miss_field: str | None = Field(description="What differs, if it is `identity_differs`.")
    usage: UsageOut
    timings: Annotated[AskTimingsOut, BeforeValidator(AskTimingsOut.of_ask)]
    engine: EngineOut | None


class LimitsOut(Reply):
    """What this server accepts."""

    max_upload_bytes: int
    heartbeat_s: float
    context_tokens: int | None


class VersionOut(Reply):
    """The program, its limits and, once loaded, its engine."""

    version: str
    limits: LimitsOut
    engine: EngineOut | None


class ReadinessOut(Reply):
    """`missing` names the parts that are not there yet, and `detail` why."""

    ready: bool
    missing: tuple[str, ...]
    detail: str | None
