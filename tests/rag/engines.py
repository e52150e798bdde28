"""An engine that plays a script: it quotes what it is told to, writes what it is told to."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ragflash.engine.constraint import ConstraintKind, QuoteFrom
from ragflash.engine.request import (
    CacheMiss,
    Delta,
    EngineInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    PrefillProgress,
    QuoteSpan,
    Scored,
    ScoreRequest,
    SegmentKind,
    TextSegment,
    Timings,
    Usage,
)
from ragflash.errors import RagflashError
from ragflash.rag.lookup import TextCutter

Range = tuple[str, int, int]  # source id, start, end

OF_DOCUMENTS = {SegmentKind.DOCUMENT, SegmentKind.PASSAGES}
TIMINGS = Timings(1.0, 30, 10, 20.0, 4, 40.0, 21.0, 3, 2, 33)


def segments(request: GenerateRequest) -> list[tuple[str, TextSegment]]:
    """All segments of a prompt in order, each with the role of its message."""
    return [(message.role, segment) for message in request.messages for segment in message.segments]


def documents(request: GenerateRequest) -> list[TextSegment]:
    return [part for _, part in segments(request) if part.kind in OF_DOCUMENTS]


def rendered(request: GenerateRequest) -> str:
    return "".join(part.text for _, part in segments(request))


def permitted(request: GenerateRequest) -> QuoteFrom:
    """The one quote constraint of a request."""
    assert isinstance(request.constraint, tuple)
    (found,) = (part for part in request.constraint if isinstance(part, QuoteFrom))
    return found


def first_permitted(request: GenerateRequest) -> list[Range]:
    return [permitted(request).ranges[0]]


def source_text(request: GenerateRequest, wanted: Range) -> str:
    """A range of a source as the prompt shows it; dots for what it does not show."""
    source_id, start, end = wanted
    shown = {}
    for part in documents(request):
        for span in (span for span in part.spans if span.source_id == source_id):
            text = part.text[span.start : span.start + span.length]
            shown.update(enumerate(text, span.source_start))
    return "".join(shown.get(at, ".") for at in range(start, end))


@dataclass
class ScriptedEngine:
    """The part of `EngineClient` that answering uses.

    Attributes:
        quoting: Chooses what is quoted, from the request.
        written: Follows the quote.
        constraints: What it can honour.
        free_text: Written in place of a quote.
        failure: Ends a generation instead of an answer.
        likelihood: Log-probability of a question's tokens after a prompt, nats.
        miss: Reported with `cached_tokens`.
    """

    quoting: Callable[[GenerateRequest], Sequence[Range]] = first_permitted
    written: str = ""
    failure: RagflashError | None = None
    likelihood: Callable[[str], float] = lambda text: -2.0
    context_tokens: int = 4096
    constraints: tuple[ConstraintKind, ...] = tuple(ConstraintKind)
    free_text: str = ""
    cached_tokens: int = 0
    miss: CacheMiss | None = CacheMiss.NONE_STORED
    generated: list[GenerateRequest] = field(default_factory=list)
    scored: list[ScoreRequest] = field(default_factory=list)
    running: int = 0
    attending: int = 0
    lookup_tokenizer: TextCutter | None = None

    def info(self) -> EngineInfo:
        sizes = ("Q4_1", "float32", "f16", self.context_tokens, "cpu")
        return EngineInfo("toy.gguf", "ab" * 32, "llama", *sizes, constraints=self.constraints)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """One token a character."""
        return tuple(map(ord, text))

    @contextmanager
    def attended(self) -> Iterator[None]:
        self.attending += 1
        try:
            yield
        finally:
            self.attending -= 1

    async def score(self, request: ScoreRequest) -> Scored:
        self.scored.append(request)
        counts = tuple(len(target) for target in request.targets)
        likelihood = self.likelihood(request.text)
        assert math.isfinite(likelihood)
        return Scored(request.id, tuple(likelihood * count for count in counts), counts)

    async def generate(self, request: GenerateRequest):
        self.generated.append(request)
        self.running += 1
        try:
            for event in self._events(request):
                yield event
        finally:
            self.running -= 1

    def _events(self, request: GenerateRequest) -> list[Event]:
        progress = [PrefillProgress(request.id, done, 40) for done in (20, 40)]
        if self.failure is not None:
            return [*progress, Failed(request.id, self.failure)]
        text, spans = '"' + self.free_text, []
        for source_id, start, end in () if self.free_text else self.quoting(request):
            quote = source_text(request, (source_id, start, end))
            spans.append(QuoteSpan(len(text), len(text) + len(quote), source_id, start, end))
            text += quote
        text += f'"\n{self.written}\n'
        done = Finished(
            request_id=request.id,
            text=text,
            token_ids=(1, 2, 3, 4),
            reason=FinishReason.CONSTRAINT,
            usage=Usage(40, 4, self.cached_tokens),
            timings=TIMINGS,
            miss_reason=self.miss,
            quotes=tuple(spans),
        )
        return [*progress, *(Delta(request.id, character) for character in text), done]
