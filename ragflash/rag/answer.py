"""Answers a question from documents: plan → retrieve → weigh → read and quote → verify → answer.

The model may write what it likes after the quote; the quote itself is a copy by construction, and
it
is looked up again in the stored text before it leaves. Without a verified quote there is no answer.
"""

import asyncio
import hashlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field

from ragflash import metrics
from ragflash.engine.cache import CacheTier
from ragflash.engine.client import EngineClient
from ragflash.engine.request import (
    Failed,
    Finished,
    GenerateRequest,
    PrefillProgress,
    Usage,
)
from ragflash.errors import InputError, QuestionBlank
from ragflash.rag import quoting
from ragflash.rag.claims import supported_text
from ragflash.rag.context import ContextPart, build_messages, copied_from
from ragflash.rag.evidence import Evidence, gather, select
from ragflash.rag.library import Library
from ragflash.rag.plan import Plan, plan
from ragflash.rag.quotes import cite, locate
from ragflash.rag.records import (
    Answer,
    AnswerDelta,
    AskEvent,
    AskMode,
    AskRequest,
    AskSources,
    AskStatus,
    AskTimings,
    Citation,
    CitationFound,
    DocumentRecord,
    QuoteMode,
    Scope,
    SearchHit,
)
from ragflash.rag.rerank import read_candidates
from ragflash_prompts import load

_MAX_QUESTION_CHARACTERS = 20_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """Sizes of an answer's work.

    Attributes:
        candidate_chunks: Chunks whose sentences are weighed.
        shortlist: Candidates that the model reads one by one.
        passage_characters: Of passages in the context of mode `retrieve`.
    """

    candidate_chunks: int = 12
    shortlist: int = 8
    passage_characters: int = 3600


@dataclass(slots=True)
class _Run:
    """One ask under way; times are seconds of the monotonic clock."""

    scope: Scope
    request: AskRequest
    question: str
    started: float
    plan: Plan
    retrieved: float = 0.0
    weighed: float = 0.0
    evidence: list[Evidence] = field(default_factory=list)
    quoting: QuoteMode = QuoteMode.CONSTRAINED
    degraded: tuple[str, ...] = ()
    finished: Finished | None = None
    dropped_quotes: int = 0


class Answerer:
    """Answers questions over a library, with an engine or, on request, without."""

    def __init__(
        self,
        library: Library,
        engine: EngineClient | None,
        config: AnswerConfig | None = None,
        *,
        fence_key: bytes | None = None,
    ) -> None:
        self._library = library
        self._engine = engine
        self._config = config or AnswerConfig()
        self._fence_key = fence_key or secrets.token_bytes(16)

    async def answer(self, scope: Scope, request: AskRequest) -> Answer:
        """Run `ask` and return its last event."""
        async with aclosing(self.ask(scope, request)) as events:
            async for event in events:
                if isinstance(event, Answer):
                    return event
        raise AssertionError("an ask ends with its answer")

    async def ask(self, scope: Scope, request: AskRequest) -> AsyncGenerator[AskEvent, None]:
        """Answer a question; the last event is the `Answer`. Closing the iterator cancels the work.

        Raises:
            QuestionBlank: There is no word in the question.
            NotFound: A document is outside the scope.
            ContextTooLong: Mode `full` was asked for and the documents do not fit.
            EngineError: The engine could not serve the request.
        """
        engine = self._engine if request.use_engine else None
        with engine.attended() if engine is not None else nullcontext():
            async with aclosing(self._ask(engine, scope, request)) as events:
                async for event in events:
                    yield event

    async def _ask(
        self, engine: EngineClient | None, scope: Scope, request: AskRequest
    ) -> AsyncGenerator[AskEvent, None]:
        started = time.monotonic()
        question = _clean(request.question)
        chosen_plan = await asyncio.to_thread(plan, self._library, engine, scope, request)
        run = _Run(scope, request, question, started, chosen_plan)
        yield AskStatus("retrieving")
        hits = await asyncio.to_thread(self._search, run)
        run.retrieved = time.monotonic()
        yield AskSources(tuple(hits), tuple(record.id for record in run.plan.records))
        candidates = await asyncio.to_thread(gather, self._library, scope, question, hits)
        if engine is not None and candidates:
            candidates = candidates[: self._config.shortlist]
            yield AskStatus("reranking", 0, len(candidates))
            candidates = await read_candidates(engine, question, candidates, run.plan.namespace)
        run.evidence = select(candidates, request.max_quotes)
        run.weighed = time.monotonic()
        if engine is not None and run.evidence:
            async with aclosing(self._read(engine, run)) as events:
                async for event in events:
                    yield event
        for last in self._conclude(run):
            yield last

    def _search(self, run: _Run) -> list[SearchHit]:
        ids = tuple(record.id for record in run.plan.records)
        if not ids:
            return []
        limit = self._config.candidate_chunks
        return self._library.search(run.scope, run.question, document_ids=ids, limit=limit)

    async def _read(self, engine: EngineClient, run: _Run) -> AsyncGenerator[AskEvent, None]:
        """Let the model read the context, quote one of the evidence sentences, and answer."""
        run.quoting, run.degraded = quoting.choose_mode(run.request, engine.info())
        parts = await asyncio.to_thread(self._context, run)
        messages = build_messages(parts, run.question, mark=self._mark(run.question))
        request = GenerateRequest(
            id=uuid.uuid4().hex,
            messages=messages,
            namespace=run.plan.namespace,
            draft=run.request.draft,
            draft_tokens=run.request.draft_tokens,
            copied=await asyncio.to_thread(copied_from, self._library, engine, parts),
            max_tokens=quoting.QUOTE_MAX_TOKENS + run.request.max_tokens,
            constraint=quoting.constraint(run.quoting, run.evidence, run.request, engine),
        )
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, PrefillProgress):
                    yield AskStatus("reading", event.done, event.total)
                elif isinstance(event, Failed):
                    raise event.error
                elif isinstance(event, Finished):
                    run.finished = event
                    metrics.count_prompt(
                        event.timings.ttft_ms / 1000, event.tier, event.miss_reason
                    )
        yield AskStatus("answering")

    def _context(self, run: _Run) -> list[ContextPart]:
        if run.plan.mode is AskMode.FULL:
            return [
                ContextPart(record, self._library.document(run.scope, record.id))
                for record in run.plan.records
            ]
        return _passages(run.evidence, self._config.passage_characters)

    def _mark(self, question: str) -> str:
        """Fence that a document's author cannot know, the same for the same question."""
        return hashlib.blake2b(question.encode(), key=self._fence_key, digest_size=4).hexdigest()

    def _conclude(self, run: _Run) -> list[AskEvent]:
        """Verify the quotes and build the answer from what is left."""
        citations: list[Citation] = []
        for record, document, start, end in _quoted(run):
            if len(citations) == run.request.max_quotes:
                break
            if any(_overlaps(citation, record, start, end) for citation in citations):
                continue
            found = locate(document.text[start:end], document.text, near=start)
            if found is None or not start <= found[1] < found[2] <= end:
                run.dropped_quotes += 1
                continue
            match, first, last = found
            number = len(citations) + 1
            citations.append(cite(number, record, document, first, last, match=match))
        text = _answer_text(run, citations)
        answer = self._answer(run, text, tuple(citations))
        _record(answer)
        return [*(CitationFound(citation) for citation in citations), AnswerDelta(text), answer]

    def _answer(self, run: _Run, text: str, citations: tuple[Citation, ...]) -> Answer:
        finished, now = run.finished, time.monotonic()
        timings = AskTimings(
            retrieve_ms=1000 * (run.retrieved - run.started),
            rerank_ms=1000 * (run.weighed - run.retrieved),
            total_ms=1000 * (now - run.started),
            ttft_ms=finished.timings.ttft_ms if finished else None,
            engine=finished.timings if finished else None,
        )
        uses_engine = self._engine is not None and run.request.use_engine
        return Answer(
            id=uuid.uuid4().hex,
            question=run.question,
            answered=bool(citations),
            answer=text,
            citations=citations,
            mode=run.plan.mode,
            mode_reason=run.plan.reason,
            context=run.plan.context,
            usage=finished.usage if finished else Usage(0, 0, 0),
            timings=timings,
            engine=self._engine.info() if self._engine is not None and uses_engine else None,
            dropped_quotes=run.dropped_quotes,
            quoting=run.quoting if finished else None,
            degraded=run.degraded,
            cache_tier=finished.tier if finished else CacheTier.NONE,
            miss_reason=finished.miss_reason if finished else None,
            miss_field=finished.miss_field if finished else None,
        )


def _record(answer: Answer) -> None:
    metrics.ANSWERS.labels(answer.mode.value, str(answer.answered).lower()).inc()
    metrics.ANSWER_SECONDS.labels(answer.mode.value).observe(answer.timings.total_ms / 1000)
    metrics.DROPPED_QUOTES.inc(answer.dropped_quotes)
    fields = {
        "mode": answer.mode.value,
        "answered": answer.answered,
        "quotes": len(answer.citations),
        "dropped_quotes": answer.dropped_quotes,
        "prompt_tokens": answer.usage.prompt_tokens,
        "cached_tokens": answer.usage.cached_tokens,
        "ms": round(answer.timings.total_ms),
    }
    _log.info("question answered", extra=fields)


def refusal() -> str:
    """Text of an answer that the documents do not support."""
    return load("refusal").render().strip()


def _clean(question: str) -> str:
    cleaned = " ".join(question.split())
    if not any(character.isalnum() for character in cleaned):
        raise QuestionBlank("the question holds no word")
    if len(cleaned) > _MAX_QUESTION_CHARACTERS:
        raise InputError(f"the question is longer than {_MAX_QUESTION_CHARACTERS} characters")
    return cleaned


def _passages(evidence: Sequence[Evidence], budget_characters: int) -> list[ContextPart]:
    """Give the passages around the evidence, best first while they fit, in document order."""
    taken: dict[str, list[Evidence]] = {}
    left = budget_characters
    for item in evidence:
        length = item.passage_end - item.passage_start
        seen = taken.get(item.record.id, [])
        if any(item.passage_start == other.passage_start for other in seen):
            continue
        if length > left and taken:
            continue
        taken.setdefault(item.record.id, []).append(item)
        left -= length
    parts = []
    for items in taken.values():
        ranges = _merged(sorted((item.passage_start, item.passage_end) for item in items))
        parts.append(ContextPart(items[0].record, items[0].document, ranges))
    return parts


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def _quoted(run: _Run) -> list[quoting.Quoted]:
    """List what may be cited, the model's quote first; counts the quotes that may not."""
    if run.finished is None:
        return [(item.record, item.document, item.start, item.end) for item in run.evidence]
    quotes, run.dropped_quotes = quoting.find_quotes(run.quoting, run.finished, run.evidence)
    return quotes


def _overlaps(citation: Citation, record: DocumentRecord, start: int, end: int) -> bool:
    return citation.document_id == record.id and citation.start < end and citation.end > start


def _answer_text(run: _Run, citations: Sequence[Citation]) -> str:
    if not citations:
        return refusal()
    written = "" if run.finished is None else quoting.split(run.quoting, run.finished)[1]
    quotes = [citation.quote for citation in citations]
    text = supported_text(written, quotes, run.question) or " ".join(quotes[0].split())
    return text + " " + "".join(f"[{citation.n}]" for citation in citations)
