"""A document that is read beforehand is not read again by whoever asks about it."""

import asyncio
from contextlib import aclosing

import pytest

from ragflash.engine.cache import CacheTier
from ragflash.errors import ContextTooLong, EngineError, NotFound
from ragflash.rag.answer import Answerer
from ragflash.rag.records import AskMode, AskStatus, Prefilled
from tests.engine.harness import toy_engine
from tests.engine.toys import ToyModel, TurnTemplate, byte_tokenizer, random_logits
from tests.rag.asking import PUMP, answered
from tests.rag.engines import ScriptedEngine


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_tokenizer()
    logits = random_logits(tokenizer.vocab_size, looks_back=8, never=[*range(32)])
    model = ToyModel(logits, vocab_size=tokenizer.vocab_size)
    with toy_engine(model, tokenizer, template=TurnTemplate()) as running:
        yield running


def read(shelf, client, id_):
    """All events of a prefill."""

    async def collect():
        async with aclosing(Answerer(shelf.library, client).prefill(shelf.scope, id_)) as events:
            return [event async for event in events]

    return asyncio.run(collect())


def test_the_first_question_finds_all_of_the_document(shelf, engine):
    id_ = shelf.add(PUMP)
    *progress, last = read(shelf, engine.client, id_)
    assert isinstance(last, Prefilled)
    assert (last.document_id, last.cache_tier) == (id_, CacheTier.NONE)
    assert last.usage.completion_tokens == last.usage.cached_tokens == 0
    assert progress[-1] == AskStatus("reading", last.usage.prompt_tokens, last.usage.prompt_tokens)
    answer = answered(shelf, engine.client, mode=AskMode.FULL, max_tokens=4)
    assert answer.usage.cached_tokens >= len(PUMP)
    assert (answer.cache_tier, answer.miss_reason) == (CacheTier.DEVICE, None)
    again = read(shelf, engine.client, id_)[-1]
    assert again.usage.cached_tokens == answer.usage.cached_tokens
    assert (again.cache_tier, again.miss_reason) == (CacheTier.DEVICE, None)


def test_what_cannot_be_asked_cannot_be_read(shelf):
    id_ = shelf.add(PUMP)
    with pytest.raises(NotFound):
        read(shelf, ScriptedEngine(), "doc_9")
    with pytest.raises(ContextTooLong):
        read(shelf, ScriptedEngine(context_tokens=100), id_)
    with pytest.raises(EngineError, match="full queue"):
        read(shelf, ScriptedEngine(failure=EngineError("full queue")), id_)
    with pytest.raises(EngineError, match="no model"):
        read(shelf, None, id_)
