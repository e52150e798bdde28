"""An ask from question to answer, with an engine that follows a script and without one."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from ragflash.engine.constraint import Literal, QuoteFrom, Quoting
from ragflash.engine.request import (
    CacheMiss,
)
from ragflash.errors import (
    EngineDead,
    EngineOverloaded,
    InputError,
    QuestionBlank,
)
from ragflash.rag.answer import AnswerConfig, Answerer, refusal
from ragflash.rag.records import (
    Answer,
    AnswerDelta,
    AskMode,
    AskRequest,
    AskSources,
    AskStatus,
    CitationFound,
)
from tests.rag.asking import (
    ENGINES,
    MODES,
    PUMP,
    QUESTION,
    UNANSWERED,
    WARRANTY,
    answered,
    at,
    run,
)
from tests.rag.engines import ScriptedEngine, permitted, source_text


@pytest.fixture(params=ENGINES)
def any_engine(request):
    return ENGINES[request.param]()


def test_the_answer_is_the_last_event_and_the_only_one(shelf, any_engine):
    shelf.add(PUMP)
    events = run(shelf, any_engine)
    assert [isinstance(event, Answer) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].answered


@pytest.mark.parametrize("asked", [QUESTION, UNANSWERED])
def test_deltas_joined_are_the_answer(shelf, any_engine, asked):
    shelf.add(PUMP)
    events = run(shelf, any_engine, asked)
    text = "".join(event.text for event in events if isinstance(event, AnswerDelta))
    assert text == events[-1].answer


def test_each_citation_is_told_before_the_answer(shelf, any_engine):
    shelf.add(f"{PUMP} The warranty of the pump lasts 12 months when it was used at sea.")
    events = run(shelf, any_engine)
    told = tuple(event.citation for event in events if isinstance(event, CitationFound))
    assert told == events[-1].citations
    assert [citation.n for citation in told] == list(range(1, len(told) + 1))


def test_waiting_for_the_answer_gives_the_event_that_streaming_ends_with(shelf, any_engine):
    shelf.add(PUMP)
    streamed = answered(shelf, any_engine)
    answerer = Answerer(shelf.library, any_engine, fence_key=b"key")
    waited = asyncio.run(answerer.answer(shelf.scope, AskRequest(QUESTION)))
    assert replace(waited, id=streamed.id, timings=streamed.timings) == streamed


def test_progress_is_told_in_order(shelf):
    shelf.add(PUMP)
    events = run(shelf, ScriptedEngine())
    stages = [event.stage for event in events if isinstance(event, AskStatus)]
    assert list(dict.fromkeys(stages)) == ["retrieving", "reranking", "reading", "answering"]
    reading = [
        (event.done, event.total)
        for event in events
        if isinstance(event, AskStatus) and event.stage == "reading"
    ]
    assert reading == [(20, 40), (40, 40)]


def test_sources_are_told(shelf):
    id_ = shelf.add(PUMP)
    (sources,) = (event for event in run(shelf) if isinstance(event, AskSources))
    assert sources.document_ids == (id_,)
    assert [hit.chunk.document_id for hit in sources.hits] == [id_]


def test_no_evidence_is_no_answer(shelf, any_engine):
    shelf.add(PUMP)
    answer = answered(shelf, any_engine, UNANSWERED)
    assert not answer.answered
    assert answer.answer == refusal()
    assert answer.citations == ()


def test_without_evidence_nothing_is_generated(shelf):
    shelf.add(PUMP)
    engine = ScriptedEngine()
    answered(shelf, engine, UNANSWERED)
    assert engine.generated == []


def test_an_empty_collection_answers_nothing(shelf):
    engine = ScriptedEngine()
    answer = answered(shelf, engine)
    assert (answer.answered, answer.answer) == (False, refusal())
    assert engine.generated == engine.scored == []


@pytest.mark.parametrize("asked", ["", "  \n", "?!", "—"])
def test_a_blank_question_is_refused(shelf, asked):
    with pytest.raises(QuestionBlank):
        run(shelf, None, asked)


def test_a_question_that_is_too_long_is_refused(shelf):
    with pytest.raises(InputError, match="20000"):
        run(shelf, None, "why " * 6000)


def test_an_engine_that_fails_is_heard(shelf):
    shelf.add(PUMP)
    engine = ScriptedEngine(failure=EngineDead("the worker has ended"))
    with pytest.raises(EngineDead, match="the worker has ended"):
        run(shelf, engine)
    assert engine.running == 0


def test_an_engine_that_cannot_judge_is_heard(shelf):
    class Busy(ScriptedEngine):
        async def score(self, request):
            raise EngineOverloaded("full")

    shelf.add(PUMP)
    with pytest.raises(EngineOverloaded):
        run(shelf, Busy())


def test_closing_the_stream_cancels_the_engine(shelf):
    shelf.add(PUMP)
    engine = ScriptedEngine()

    async def leave_while_reading():
        async with aclosing(Answerer(shelf.library, engine).ask(shelf.scope, ask)) as events:
            async for event in events:
                if isinstance(event, AskStatus) and event.stage == "reading":
                    assert engine.running == 1
                    break
        assert engine.running == 0

    ask = AskRequest(QUESTION)
    asyncio.run(leave_while_reading())
    assert len(engine.generated) == 1


def test_an_ask_without_the_engine_sends_it_nothing(shelf):
    shelf.add(PUMP)
    engine = ScriptedEngine()
    answer = answered(shelf, engine, use_engine=False)
    assert engine.generated == engine.scored == []
    assert answer.answer == f"{WARRANTY} [1]"
    assert answer.engine is None
    assert answer.usage.prompt_tokens == 0
    assert answer.mode is AskMode.RETRIEVE


def test_the_reply_says_what_the_engine_did(shelf):
    shelf.add(PUMP)
    engine = ScriptedEngine(cached_tokens=10, miss=None)
    answer = answered(shelf, engine)
    assert answer.engine == engine.info()
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (40, 10)
    assert answer.miss_reason is None
    assert answer.timings.engine is not None
    assert answer.timings.ttft_ms == answer.timings.engine.ttft_ms


def test_the_reply_says_why_nothing_was_reused(shelf):
    shelf.add(PUMP)
    answer = answered(shelf, ScriptedEngine(miss=CacheMiss.EVICTED))
    assert answer.miss_reason == "evicted"


@pytest.mark.parametrize("mode", MODES)
def test_the_model_may_quote_the_chosen_sentences_only(shelf, mode):
    id_ = shelf.add(PUMP)
    engine = ScriptedEngine()
    answered(shelf, engine, mode=mode, max_tokens=50)
    (request,) = engine.generated
    assert permitted(request).ranges == ((id_, *at(PUMP, WARRANTY)),)
    assert permitted(request).source_ids == (id_,)
    assert source_text(request, (id_, *at(PUMP, WARRANTY))) == WARRANTY
    opening, _, closing, written = request.constraint
    assert (opening, closing) == (Literal('"'), Literal('"\n'))
    assert written == Quoting(QuoteFrom((id_,)), max_quotes=2, until="\n", max_tokens=50)
    assert request.namespace == shelf.collection


def test_the_model_judges_no_more_than_the_shortlist(shelf):
    shelf.add(" ".join(f"The warranty of the pump lasts {n} months in zone {n}." for n in range(9)))
    engine = ScriptedEngine()
    answered(shelf, engine, config=AnswerConfig(shortlist=4))
    assert len(engine.scored) == 1 + 4


def test_a_written_answer_that_the_quote_supports_leaves(shelf):
    shelf.add(PUMP)
    engine = ScriptedEngine(written="The warranty of the pump lasts 24 months.")
    assert answered(shelf, engine).answer == "The warranty of the pump lasts 24 months. [1]"


@pytest.mark.parametrize(
    "written",
    [
        "The warranty of the pump lasts 36 months.",
        "The warranty of the pump lasts 4 months.",
        "The warranty of the pump of Hamburg lasts 24 months.",
        "Pumps were invented by sailors in ancient times.",
        "",
    ],
)
def test_what_is_invented_is_replaced_by_the_quote(shelf, written):
    shelf.add(PUMP)
    assert answered(shelf, ScriptedEngine(written=written)).answer == f"{WARRANTY} [1]"


def test_what_is_invented_behind_a_supported_sentence_is_dropped(shelf):
    shelf.add(PUMP)
    good = "The warranty of the pump lasts 24 months."
    engine = ScriptedEngine(written=f"{good} It was made by Hamburg Works in 1999.")
    assert answered(shelf, engine).answer == f"{good} [1]"
