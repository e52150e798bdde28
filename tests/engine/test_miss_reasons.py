"""A reply names the first text of a prompt that is kept for later and had to be computed."""

import logging

import pytest

from ragflash.engine.cache import CacheMiss
from ragflash.engine.request import GenerateRequest, SegmentKind, TextSegment
from tests.engine.harness import toy_engine
from tests.engine.toys import ToyModel, ask, byte_tokenizer, document, random_logits, user

TOKENIZER = byte_tokenizer()
RULES = TextSegment(SegmentKind.RULES, "rules;")
FIRST, SECOND = (document(name * 300, name) for name in "ab")


@pytest.fixture
def engine():
    logits = random_logits(TOKENIZER.vocab_size)
    with toy_engine(ToyModel(logits, vocab_size=TOKENIZER.vocab_size), TOKENIZER) as running:
        yield running


def reason(engine, *segments, **options):
    """Of a prompt that ends with a question of its own."""
    return engine.complete(ask("what?", *segments, max_tokens=1, **options)).miss_reason


def test_a_question_is_never_missed(engine):
    assert reason(engine) is None
    assert reason(engine, RULES, FIRST) is CacheMiss.NONE_STORED
    assert reason(engine, RULES, FIRST) is None
    turn = TextSegment(SegmentKind.CONVERSATION, "earlier")
    assert reason(engine, RULES, FIRST, turn) is CacheMiss.NONE_STORED
    assert reason(engine, RULES, FIRST) is None, "though something else is stored behind it"


def test_a_new_document_is_missed_though_its_rules_are_stored(engine):
    reason(engine, RULES, FIRST)
    assert reason(engine, RULES, SECOND) is CacheMiss.PREFIX_DIFFERS
    assert reason(engine, RULES, SECOND) is None


def test_a_document_behind_what_a_client_brings_is_missed_for_that(engine):
    reason(engine, RULES, FIRST)
    brought = TextSegment(SegmentKind.CONVERSATION, "brought;")
    asked = (brought, RULES, FIRST)
    assert reason(engine, *asked, client_prefix=True) is CacheMiss.CLIENT_PREFIX
    assert reason(engine, *asked, client_prefix=True) is None


def test_what_is_kept_of_a_prompt_ends_with_the_first_text_that_is_not(engine):
    """Nothing is stored behind a question, so nothing there can be missed."""
    late = TextSegment(SegmentKind.CONVERSATION, "late")
    between = TextSegment(SegmentKind.QUESTION, "between?")
    request = GenerateRequest("r", user(RULES, between, late, between), max_tokens=1)
    assert engine.complete(request).miss_reason is CacheMiss.NONE_STORED
    assert engine.complete(request).miss_reason is None


def test_the_log_says_what_was_reused_and_why_not_more(engine, caplog):
    with caplog.at_level(logging.INFO, "ragflash.engine.scheduler"):
        for segments in ((RULES, FIRST), (RULES, FIRST), (RULES, SECOND)):
            reason(engine, *segments)
        reason(engine, RULES, SECOND, cache=False)
    said = [(record.tier, record.cached_tokens, record.miss_reason) for record in caplog.records]
    assert said == [
        ("none", 0, "none_stored"),
        ("device", 306, "none"),
        ("device", 6, "prefix_differs"),
    ]
