"""Conversations about a document: what clients bring stands behind it, and all share it."""

import asyncio
import json
from dataclasses import replace

import pytest

from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.request import ChatMessage, Finished, GenerateRequest, SegmentKind, TextSegment
from ragflash.errors import InputError, NotFound
from ragflash.gguf.chat_template import ChatTemplate
from ragflash.gguf.template_builtin import BUILTIN_TEMPLATES
from ragflash.rag.conversation import Conversations
from ragflash.rag.prefill import EngineReader
from ragflash.rag.records import Scope
from tests.engine.harness import toy_engine
from tests.engine.toys import ToyModel, byte_tokenizer, random_logits
from tests.rag.asking import PUMP

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"a": "ü"}}}]
# As some models have it: what the system says opens the user's last turn.
SYSTEM_LAST = """
{%- set kept = namespace(rules='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{%- set kept.rules = message.content %}
{%- else %}
{{- '<|turn|>' ~ message.role }}{%- if loop.last %}{{- kept.rules }}{%- endif %}
{{- message.content ~ '<|end|>' }}
{%- endif %}
{%- endfor %}
"""
NO_SYSTEM = """
{%- for message in messages %}
{%- if message.role == 'system' %}{{- raise_exception('no system turns') }}{%- endif %}
{{- '<|turn|>' ~ message.role ~ message.content ~ '<|end|>' }}
{%- endfor %}
"""
DATED = "{{- date }}" + BUILTIN_TEMPLATES["chatml"]


def running(template=BUILTIN_TEMPLATES["chatml"]):
    tokenizer = byte_tokenizer()
    logits = random_logits(tokenizer.vocab_size, looks_back=8, never=[*range(32)])
    model = ToyModel(logits, vocab_size=tokenizer.vocab_size)
    return toy_engine(model, tokenizer, template=ChatTemplate(template))


@pytest.fixture(scope="module")
def engine():
    with running() as made:
        yield made


def message(role, text, kind=SegmentKind.CONVERSATION):
    return ChatMessage(role, (TextSegment(kind, text),))


def request(*messages, **options):
    *before, last = messages
    *roles, question = [message(*each) for each in (*before, last)]
    last_turn = (replace(question.segments[0], kind=SegmentKind.QUESTION),)
    turns = (*roles, ChatMessage(question.role, last_turn))
    return GenerateRequest("r", turns, max_tokens=3, **options)


def talk(shelf, engine, id_, asked, tools=()):
    """The end of a request about a document, and the rows that it took."""
    placed = Conversations(shelf.library, engine.client).place(shelf.scope, id_, asked, tools)
    before = engine.runner.num_rows
    finished = engine.complete(placed)
    return finished, engine.runner.num_rows - before


def text_of(placed):
    return "".join(part.text for each in placed.messages for part in each.segments)


def read_ahead(shelf, engine, id_):
    async def read():
        document = shelf.library.get(shelf.scope, id_)
        return [event async for event in EngineReader(shelf.library, engine.client).read(document)]

    assert isinstance(asyncio.run(read())[-1], Finished)


def test_two_clients_share_a_document(shelf, engine):
    id_ = shelf.add(PUMP * 5)
    first, _ = talk(shelf, engine, id_, request(("system", "Be brief."), ("user", "Hello?")))
    assert first.usage.cached_tokens == 0
    asked = request(("system", "Answer as a pirate."), ("user", "Who are you?"))
    second, num_rows = talk(shelf, engine, id_, asked, TOOLS)
    assert second.usage.cached_tokens >= len(PUMP * 5)
    assert num_rows == second.usage.prompt_tokens - second.usage.cached_tokens + 2
    assert second.tier is CacheTier.DEVICE
    again, _ = talk(shelf, engine, id_, asked, TOOLS)
    assert again.miss_reason is None
    assert again.usage.cached_tokens > second.usage.cached_tokens


def test_a_conversation_finds_what_was_read_ahead(shelf, engine):
    id_ = shelf.add(PUMP * 3)
    read_ahead(shelf, engine, id_)
    finished, _ = talk(shelf, engine, id_, request(("user", "Hello?")))
    assert finished.usage.cached_tokens >= len(PUMP * 3)


def test_later_turns_go_on_where_the_conversation_was(shelf, engine):
    id_ = shelf.add(PUMP)
    turns = [("system", "Be brief."), ("user", "one?"), ("assistant", "1"), ("user", "two?")]
    talk(shelf, engine, id_, request(*turns[:2]))
    second, _ = talk(shelf, engine, id_, request(*turns))
    third, num_rows = talk(
        shelf, engine, id_, request(*turns, ("assistant", "2"), ("user", "three?"))
    )
    reread = sum(map(len, ("two?", "2", "three?")))
    assert third.usage.cached_tokens > second.usage.cached_tokens
    assert reread < num_rows < reread + 150, "the new turns and their markup"


def test_what_a_client_brings_stands_behind_the_document_and_its_mark(shelf, engine):
    id_ = shelf.add(PUMP)
    asked = request(
        ("system", "First."), ("system", "Second."), ("user", "Hi."), ("system", "Later."),
        ("user", "Hello?"),
    )  # fmt: skip
    placed = Conversations(shelf.library, engine.client).place(shelf.scope, id_, asked, TOOLS)
    assert [each.role for each in placed.messages] == ["system", "user", "user", "user"]
    text = text_of(placed)
    spelled = json.dumps(TOOLS, ensure_ascii=False, separators=(",", ":"))
    wanted = [PUMP, "up to this mark", "First.", "Second.", spelled, "Hi.", "Later.", "Hello?"]
    places = [text.index(each) for each in wanted]
    assert places == sorted(places)
    rules, shown, *_ = (part for each in placed.messages for part in each.segments)
    assert (rules.kind, shown.kind) == (SegmentKind.RULES, SegmentKind.DOCUMENT)
    assert placed.namespace == shelf.collection
    assert not placed.client_prefix


def test_a_conversation_may_begin_with_the_assistant(shelf, engine):
    id_ = shelf.add(PUMP)
    asked = request(("assistant", "How can I help?"), ("user", "Hello?"))
    placed = Conversations(shelf.library, engine.client).place(shelf.scope, id_, asked)
    assert [each.role for each in placed.messages] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("template", [SYSTEM_LAST, NO_SYSTEM])
def test_a_template_that_cannot_place_it_so_is_told(shelf, template):
    id_ = shelf.add(PUMP)
    turns = [("user", "one?"), ("assistant", "1"), ("user", "two?")]
    with running(template) as engine:
        finished, _ = talk(shelf, engine, id_, request(*turns))
        assert finished.miss_reason is CacheMiss.CLIENT_PREFIX
        again, _ = talk(shelf, engine, id_, request(*turns))
        assert again.usage.cached_tokens >= len(PUMP), "its own turns are used again"
        assert again.miss_reason is None


def test_a_template_that_is_told_something_in_front_is_told(shelf):
    id_ = shelf.add(PUMP)
    with running(DATED) as engine:
        talk(shelf, engine, id_, request(("user", "one?")))
        dated = request(("user", "two?"), variables=(("date", "today"),))
        assert talk(shelf, engine, id_, dated)[0].miss_reason is CacheMiss.CLIENT_PREFIX
        thinking = request(("user", "two?"), variables=(("enable_thinking", True),))
        assert talk(shelf, engine, id_, thinking)[0].miss_reason is None


def test_what_cannot_be_asked_cannot_be_talked_about(shelf, engine):
    conversations = Conversations(shelf.library, engine.client)
    id_, asked = shelf.add(PUMP), request(("user", "Hello?"))
    with pytest.raises(NotFound):
        conversations.place(Scope(frozenset({"other"})), id_, asked)
    with pytest.raises(NotFound):
        conversations.place(shelf.scope, "doc_9", asked)
    empty = shelf.add(" ")
    with pytest.raises(NotFound, match="failed"):
        conversations.place(shelf.scope, empty, asked)


def test_variables_that_break_the_template_are_the_clients_fault(shelf):
    id_ = shelf.add(PUMP)
    with running("{{- date.year.first }}" + BUILTIN_TEMPLATES["chatml"]) as engine:
        asked = request(("user", "one?"), variables=(("date", 1),))
        placed = Conversations(shelf.library, engine.client).place(shelf.scope, id_, asked)
        with pytest.raises(InputError):
            engine.complete(placed)
