"""Drafts from documents and output: an account of where they came from, and what is refused."""

import asyncio
from contextlib import closing

import pytest

from ragflash.engine.build import start_engine
from ragflash.engine.request import (
    ChatMessage,
    DraftMode,
    GenerateRequest,
    SamplingParams,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.errors import InputError
from tests.models.families import FAMILIES
from tests.models.toy_files import TOKENS, write_gguf

DOCUMENT = "Seals are replaced every year; the pressure is 16 bar. " * 5


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    paths = {}

    def start(name, **options):
        if name not in paths:
            family = FAMILIES[name]
            path = paths[name] = tmp_path_factory.mktemp(name) / "toy.gguf"
            tensors = family.tensors(family.build(seed=1, vocab_size=len(TOKENS)))
            write_gguf(path, family.architecture, family.metadata, tensors, tokenizer=True)
        sizes = {"kv_bytes": 64 << 20, "prefill_chunk_tokens": 96, "threads": 1}
        return closing(start_engine(paths[name], dtype="float32", **sizes, **options))

    return start


def ask(engine, **options):
    segments = (
        TextSegment(SegmentKind.DOCUMENT, DOCUMENT, (Span("manual", 0, 0, len(DOCUMENT)),)),
        TextSegment(SegmentKind.QUESTION, "Copy it."),
    )
    options = {"max_tokens": 24, **options}
    request = GenerateRequest("r", (ChatMessage("user", segments),), **options)
    return asyncio.run(engine.complete(request))


def test_what_repeats_is_accepted_and_counted_by_source(start):
    with start("llama", drafts=True) as engine:
        found = ask(engine, draft=DraftMode.LOOKUP, max_tokens=200)
        plain = ask(engine, draft=DraftMode.OFF, max_tokens=200)
        stats = engine.stats()
    assert found.token_ids == plain.token_ids
    assert {count.source for count in found.timings.drafts} <= {"lookup", "lookup_output"}
    assert all(0 <= count.accepted <= count.drafted for count in found.timings.drafts)
    assert found.timings.draft_n == sum(count.drafted for count in found.timings.drafts)
    accepted = sum(count.accepted for count in found.timings.drafts)
    assert 0 < accepted == found.timings.draft_n_accepted
    assert plain.timings.draft_n == 0
    assert plain.timings.drafts == plain.timings.idle_steps == ()
    assert stats.drafted_tokens == {count.source: count.drafted for count in found.timings.drafts}
    assert sum(stats.accepted_tokens.values()) == accepted


def test_no_index_of_a_deleted_document_is_kept(start):
    with start("llama", drafts=True) as engine:
        ask(engine, draft=DraftMode.LOOKUP)
        indexes = engine._drafting._indexes
        assert indexes.num_bytes > 0
        asyncio.run(engine.drop_source("manual"))
        assert indexes.num_bytes == 0


def test_a_width_is_kept_to(start):
    with start("llama", drafts=True) as engine:
        narrow = ask(engine, draft=DraftMode.LOOKUP, draft_tokens=1)
        (drafted,) = {count.drafted for count in narrow.timings.drafts} or {0}
    assert drafted <= len(narrow.token_ids)


def test_why_nothing_was_drafted_is_said(start):
    with start("llama", drafts=True) as engine:
        found = ask(engine, draft=DraftMode.AUTO, sampling=SamplingParams(temperature=50.0, seed=1))
    reasons = dict(found.timings.idle_steps)
    assert set(reasons) <= {"nothing_found", "no_gain", "lost_time"}
    assert 0 < sum(reasons.values()) <= len(found.token_ids)


def test_drafts_that_cannot_be_had_are_refused(start):
    with start("llama") as engine, pytest.raises(InputError, match="does not draft"):
        ask(engine, draft=DraftMode.LOOKUP)
    with pytest.raises(InputError, match="draft_tokens = 0"):
        GenerateRequest("r", (), draft_tokens=0)
