"""The engine on a real model, end to end."""

import asyncio

import pytest

from ragflash.engine.build import start_engine
from ragflash.engine.constraint import Free, Literal, QuoteFrom
from ragflash.engine.request import (
    ChatMessage,
    GenerateRequest,
    ScoreRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.errors import SettingInvalid

DOCUMENT = (
    "The warranty of the Mk II pump lasts 36 months. Seals must be replaced every year. "
    "The maximum pressure is 16 bar."
)
SENTENCES = [(0, 47), (48, 82), (83, 114)]


@pytest.fixture(scope="module")
def engine(packaged_model_path):
    client = start_engine(packaged_model_path, kv_bytes=256 << 20, threads=2)
    yield client
    client.close()


def question(text, *before):
    segments = (*before, TextSegment(SegmentKind.QUESTION, text))
    return (ChatMessage("user", segments),)


def document():
    head = "Document:\n"
    span = Span("pump", 0, len(head), len(DOCUMENT))
    return TextSegment(SegmentKind.DOCUMENT, f"{head}{DOCUMENT}\n", (span,))


def test_answers_a_question(engine):
    request = GenerateRequest("capital", question("What is the capital of France?"), max_tokens=16)
    finished = asyncio.run(engine.complete(request))
    assert finished.text == "The capital of France is Paris."


def test_quotes_a_sentence_word_for_word_and_reuses_the_document(engine):
    ranges = tuple(("pump", start, end) for start, end in SENTENCES)
    constraint = (
        Literal('"'),
        QuoteFrom(("pump",), min_words=1, ranges=ranges),
        Literal('"\n'),
        Free(until="\n", max_tokens=4),
    )
    cached = []
    for name in ("first", "second"):
        request = GenerateRequest(
            name,
            question("What is the maximum pressure of the pump?", document()),
            constraint=constraint,
        )
        finished = asyncio.run(engine.complete(request))
        (quote,) = finished.quotes
        source = DOCUMENT[quote.source_start : quote.source_end]
        assert (quote.source_start, quote.source_end) in SENTENCES
        assert finished.text[quote.start : quote.end] == source
        cached.append(finished.usage.cached_tokens)
    assert source == "The maximum pressure is 16 bar."
    assert cached[0] == 0
    assert cached[1] > 30


def test_scores_the_likelier_text_higher(engine):
    request = ScoreRequest(
        "score", question("What is the capital of France?"), ("Paris", "Paris is", "Berlin")
    )
    scored = asyncio.run(engine.score(request))
    paris, longer, berlin = scored.logprobs
    assert 0 > paris > longer
    assert paris > berlin
    assert scored.num_tokens == (1, 2, 2)


@pytest.mark.parametrize(
    "settings", [{"max_slots": 0}, {"threads": 0}, {"prefill_chunk_tokens": 0}]
)
def test_sizes_that_make_no_sense_are_refused(settings, packaged_model_path):
    with pytest.raises(SettingInvalid):
        start_engine(packaged_model_path, **settings)


def test_says_what_it_runs(engine, packaged_model_path):
    info = engine.info()
    assert info.model == packaged_model_path.name
    assert (info.architecture, info.device) == ("llama", "cpu")
    assert info.weights.startswith("Q")
    assert 0 < info.context_tokens <= 8192


def test_says_that_weights_stay_packed(packaged_model_path):
    client = start_engine(packaged_model_path, kv_bytes=64 << 20, threads=2, weights="packed")
    client.close()
    assert client.info().compute_dtype.endswith("+int4")


@pytest.mark.slow
def test_old_tokens_in_8_bits_hardly_change_an_answer(engine, packaged_model_path):
    materials = ["steel", "brass", "rubber", "copper", "bronze", "nylon", "zinc", "iron"] * 7
    parts = [f"Part {at} weighs {3 * at + 7} grams, of {m}. " for at, m in enumerate(materials)]
    text = "".join([*parts[:28], DOCUMENT, " ", *parts[28:]])
    segment = TextSegment(SegmentKind.DOCUMENT, text, (Span("pump", 0, 0, len(text)),))
    messages = question("How long is the warranty of the Mk II pump?", segment)
    answer = GenerateRequest("answer", messages, max_tokens=12)
    choices = ScoreRequest("choices", messages, ("The warranty lasts 36 months.", "One year."))
    packed = start_engine(packaged_model_path, threads=2, kv_format="q8_0", grid_tokens=256)
    try:
        answers = [asyncio.run(client.complete(answer)) for client in (engine, packed)]
        scores = [asyncio.run(client.score(choices)).logprobs for client in (engine, packed)]
    finally:
        packed.close()
    assert answers[0].usage.prompt_tokens > 768  # page 1 is packed then
    assert "36 months" in answers[0].text
    assert answers[1].text == answers[0].text
    assert scores[1] == pytest.approx(scores[0], abs=0.1)
    assert scores[1] != scores[0]
