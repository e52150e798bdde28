"""Evidence in the order of how much likelier it makes the question."""

import asyncio

import pytest

from ragflash.errors import EngineOverloaded
from ragflash.rag.answer_type import AnswerType
from ragflash.rag.evidence import Evidence
from ragflash.rag.rerank import read_candidates
from ragflash_ingest.document import Document, DocumentPage
from tests.rag.engines import ScriptedEngine

TEXT = "Apples are red. Plums are blue. Pears are green."
DOCUMENT = Document(
    TEXT, (DocumentPage(1, None, 0, len(TEXT)),), (), "text/plain", None, (), "test"
)


def evidence(word: str, weight: float = 1.0) -> Evidence:
    start = TEXT.index(word)
    end = TEXT.index(".", start) + 1
    return Evidence(
        record=None,
        document=DOCUMENT,
        start=start,
        end=end,
        window_start=start,
        window_end=end,
        passage_start=0,
        passage_end=len(TEXT),
        weight=weight,
        worst_word=1.0,
        kind=AnswerType.ANY,
        is_kind=True,
        has_names=True,
    )


def read(engine: ScriptedEngine, *items: Evidence) -> list[Evidence]:
    return asyncio.run(read_candidates(engine, "Which fruit is blue?", items, "mine"))


def test_the_text_that_predicts_the_question_comes_first():
    engine = ScriptedEngine(likelihood=lambda text: -1.0 if "Plums" in text else -3.0)
    found = read(engine, evidence("Apples"), evidence("Plums"), evidence("Pears"))
    assert [item.text for item in found] == [
        "Plums are blue.",
        "Apples are red.",
        "Pears are green.",
    ]


def test_the_gain_is_over_the_likelihood_without_a_text():
    engine = ScriptedEngine(likelihood=lambda text: -1.5 if "Plums" in text else -2.0)
    (plums, apples) = read(engine, evidence("Apples"), evidence("Plums"))
    assert plums.gain == pytest.approx(0.5)
    assert apples.gain == pytest.approx(0.0)
    assert plums.score > apples.score == apples.weight


def test_gains_are_nats_a_token_whatever_the_length_of_the_question():
    engine = ScriptedEngine(likelihood=lambda text: -1.5 if "Plums" in text else -2.0)
    long = "Which " + "very " * 50 + "fruit?"
    (plums,) = asyncio.run(read_candidates(engine, long, [evidence("Plums")], "mine"))
    assert plums.gain == pytest.approx(0.5)


def test_a_heavier_candidate_stays_ahead_of_a_small_gain():
    engine = ScriptedEngine(likelihood=lambda text: -1.9 if "Plums" in text else -2.0)
    found = read(engine, evidence("Plums", 1.0), evidence("Apples", 2.0))
    assert found[0].text == "Apples are red."


def test_the_question_is_scored_after_each_window_and_after_none():
    engine = ScriptedEngine()
    read(engine, evidence("Apples"), evidence("Plums"))
    assert len(engine.scored) == 3
    assert [TEXT[:6] in request.text for request in engine.scored] == [False, True, False]
    for request in engine.scored:
        assert request.targets == (" Which fruit is blue?",)
        assert request.namespace == "mine"
    assert len({request.id for request in engine.scored}) == 3


def test_an_engine_that_refuses_is_heard():
    class Busy(ScriptedEngine):
        async def score(self, request):
            raise EngineOverloaded("full")

    with pytest.raises(EngineOverloaded):
        read(Busy(), evidence("Apples"))
