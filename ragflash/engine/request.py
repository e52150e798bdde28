"""What crosses the border between the engine and everyone else.

Frozen, tensor-free values only: a request goes in, events come out, and exactly one of them, the
last, is terminal
(`Finished` or `Failed`). Nothing here knows models, devices or HTTP.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.constraint import Constraint, ConstraintKind
from ragflash.engine.logprobs import MAX_TOP, TokenLogprob
from ragflash.errors import InputError, RagflashError
from ragflash.speculative.lookup import SourceIndex


class SegmentKind(StrEnum):
    """Role of a run of text in a prompt; prompts are ordered as listed here.

    Passages were chosen for one question: they are remembered, and not kept in files.
    """

    RULES = "rules"
    DOCUMENT = "document"
    PASSAGES = "passages"
    CONVERSATION = "conversation"
    QUESTION = "question"


@dataclass(frozen=True, slots=True)
class Span:
    """A run of source text inside a segment.

    Attributes:
        source_id: Document that the text comes from.
        source_start: Character offset in the document's stored text.
        start: Character offset in the segment's text.
        length: Number of characters; text and source are equal over it.
    """

    source_id: str
    source_start: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A run of prompt text that is cached, or not, as one.

    Attributes:
        spans: The parts that are copied from documents, in order of `start`; the rest is our own
            wording.
    """

    kind: SegmentKind
    text: str
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; `role` is `system`, `user` or `assistant`."""

    role: str
    segments: tuple[TextSegment, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the defaults are greedy.

    Attributes:
        temperature: 0 is greedy; else in [1e-30, 100].
        top_k: 0 is off.
        top_p: In (0, 1]; 1 is off.
        min_p: In [0, 1); 0 is off.
        repetition_penalty: Over prompt and output, in [0.01, 100]; 1 is off.
        presence_penalty: Over the output, 0 is off.
        frequency_penalty: Over the output, 0 is off.
        seed: Same seed, same draws, whatever else runs beside; `None` draws one.
        logit_bias: Token ids and what is added to their logits, in [-100, 100].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Raise `InputError` for a value outside its range."""
        checks = {
            # Below these a logit that is divided by them is no f32 any more.
            "temperature": self.temperature == 0.0 or 1e-30 <= self.temperature <= 100.0,
            "top_k": self.top_k >= 0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "min_p": 0.0 <= self.min_p < 1.0,
            "repetition_penalty": 0.01 <= self.repetition_penalty <= 100.0,
            "presence_penalty": -2.0 <= self.presence_penalty <= 2.0,
            "frequency_penalty": -2.0 <= self.frequency_penalty <= 2.0,
            "logit_bias": all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias),
        }
        for name, holds in checks.items():
            if not holds:
                raise InputError(f"{name} = {getattr(self, name)} is out of range")

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were seen before are penalised."""
        is_plain = self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        return self.repetition_penalty != 1.0 or not is_plain

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is simply the largest logit."""
        return self.temperature == 0.0 and not self.logit_bias and not self.has_penalties


MAX_DRAFT = 31
"""Most tokens that a request may want drafted in a step."""


class DraftMode(StrEnum):
    """Who may propose tokens.

    `auto` is whoever is worth it. The others propose in every step in which they can: `lookup` and
    `tree` are chains and trees that are looked up, `mtp` is the model's own block of multi-token
    prediction, `dflash` the drafter that the engine was given; with one, `tree` are trees of what
    it predicts, and of what is looked up.
    """

    AUTO = "auto"
    OFF = "off"
    LOOKUP = "lookup"
    TREE = "tree"
    MTP = "mtp"
    DFLASH = "dflash"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Ask for a continuation.

    Attributes:
        id: Unique among the requests in flight.
        messages: Rendered with the model's chat template; a generation prompt is added.
        namespace: Cached segments are shared among requests of one namespace only (a collection
            id).
        max_tokens: At most that many output tokens; clamped to what the context leaves.
        stop: The text ends before the first occurrence of any of these.
        constraint: `None` is free text.
        draft: Who may propose tokens; whoever does, the output is the same.
        draft_tokens: At most that many in a step; `None` leaves it to the drafter.
        copied: Ids and indexes of documents that drafts may be copied from as a whole, however
            little of them the prompt holds; of others the prompt's text is indexed.
        cache: Whether segments of this prompt are kept for later requests.
        keep_prompt: Whether requests of the same prompt follow: all of it but its last token is
            kept for them.
        logprobs: Whether the log-probabilities of the output's tokens are wanted.
        top_logprobs: With those of as many likeliest tokens, 0 to 20.
        variables: Names and values that the chat template is told besides, such as
            `enable_thinking`, which is false unless it is among them.
        client_prefix: Whether what a client brings stands before the documents of the prompt, so
            that what is stored of these for others does not fit; the reply gives it as the reason.
        background: Whether it runs only while no other request does.
    """

    id: str
    messages: tuple[ChatMessage, ...]
    namespace: str = ""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    draft: DraftMode = DraftMode.AUTO
    draft_tokens: int | None = None
    copied: tuple[tuple[str, SourceIndex], ...] = ()
    cache: bool = True
    keep_prompt: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    variables: tuple[tuple[str, object], ...] = ()
    client_prefix: bool = False
    background: bool = False

    def __post_init__(self) -> None:
        """Raise `InputError` for a number outside its range."""
        if not 0 <= self.top_logprobs <= MAX_TOP:
            raise InputError(f"top_logprobs = {self.top_logprobs} is not between 0 and {MAX_TOP}")
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs are given with logprobs alone: ask for both")
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= MAX_DRAFT:
            raise InputError(f"draft_tokens = {self.draft_tokens} is not between 1 and {MAX_DRAFT}")


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Ask for the log-probability of each continuation after one prompt.

    Every target is appended as plain text to the prompt and scored apart; the prompt is prefilled
    once. One `Scored` event, then `Finished`.

    Attributes:
        messages: Rendered with a generation prompt.
        text: Instead of messages: a prompt of plain text, without the chat template.
    """

    id: str
    messages: tuple[ChatMessage, ...] = ()
    targets: tuple[str, ...] = ()
    text: str = ""
    namespace: str = ""
    cache: bool = False


Request = GenerateRequest | ScoreRequest


class FinishReason(StrEnum):
    """Why the output ended."""

    STOP = "stop"
    LENGTH = "length"
    CONSTRAINT = "constraint"
    SCORED = "scored"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; the prefill of `cached_tokens` of the prompt was skipped."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class DraftCount:
    """Tokens that a source drafted, and those of them that were accepted."""

    source: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went.

    Attributes:
        queue_ms: From submission to admission.
        prompt_n: Prompt tokens that were computed.
        cache_n: Prompt tokens that were not.
        prompt_ms: From admission, what is read from files included, to the first sampled token.
        predicted_n: Output tokens.
        predicted_ms: From the first sampled token to the last.
        ttft_ms: From submission to the first sampled token.
        draft_n: Drafted tokens.
        draft_n_accepted: Drafted tokens that were accepted.
        drafts: The same by source.
        idle_steps: Steps without a draft, by the reason, when drafts were allowed.
        forward_rows: Rows that went through the model for this request.
        restore_ms: Of `prompt_ms`: reading stored segments from files.
        restore_gb_s: 10⁹ bytes a second of that.
    """

    queue_ms: float
    prompt_n: int
    cache_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    ttft_ms: float
    draft_n: int
    draft_n_accepted: int
    forward_rows: int
    drafts: tuple[DraftCount, ...] = ()
    idle_steps: tuple[tuple[str, int], ...] = ()
    restore_ms: float = 0.0
    restore_gb_s: float = 0.0

    @property
    def predicted_per_second(self) -> float:
        """Output tokens a second of decoding; 0 when nothing was decoded."""
        return 1000.0 * self.predicted_n / self.predicted_ms if self.predicted_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the cache."""

    request_id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text; the texts of all deltas joined are the output, and each is valid Unicode.

    Attributes:
        logprobs: Of the tokens whose first character is in it, when asked for.
    """

    request_id: str
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class QuoteSpan:
    """A run of the output that a `QuoteFrom` made: its characters and the source they copy."""

    start: int
    end: int
    source_id: str
    source_start: int
    source_end: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Per target: summed log-probability (nats) and number of tokens."""

    request_id: str
    logprobs: tuple[float, ...]
    num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal: the request is done and `text` is the whole output.

    Attributes:
        miss_reason: Why something that is kept of prompts was computed; `None` when nothing was.
        miss_field: Of the identity, what differs where that is the reason.
        tier: Where the cached tokens were; `file` if some were in files.
        num_shown: Tokens that `text` shows something of: all but those of a stop.
        logprobs: Of all tokens, when asked for.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    timings: Timings
    miss_reason: CacheMiss | None
    quotes: tuple[QuoteSpan, ...] = ()
    num_shown: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    miss_field: str | None = None
    tier: CacheTier = CacheTier.NONE


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the request ended by an error."""

    request_id: str
    error: RagflashError


Event = PrefillProgress | Delta | Scored | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a reply says about the engine that made it.

    Attributes:
        model: File name of the model.
        model_hash: SHA-256 of the file.
        architecture: As in GGUF `general.architecture`.
        weights: Quantisation of most weights, e.g. `Q4_1`.
        compute_dtype: e.g. `bfloat16`; `float32+int4` where 4-bit weights stay packed.
        kv_format: Of K and V pages.
        context_tokens: Longest prompt and output together.
        template: Where the chat template comes from: `model file`, or `built-in` and a family.
        constraints: Kinds that it can honour.
    """

    model: str
    model_hash: str
    architecture: str
    weights: str
    compute_dtype: str
    kv_format: str
    context_tokens: int
    device: str
    template: str = "model file"
    constraints: tuple[ConstraintKind, ...] = tuple(ConstraintKind)
