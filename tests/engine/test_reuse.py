"""What is stored of prompts is used again, by the right requests only."""

import hashlib
import itertools
import queue
import re
import threading

import pytest

from ragflash.engine.cache import CacheMiss
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import (
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    SegmentKind,
    TextSegment,
)
from ragflash.kvcache.segments import SegmentHit
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    ToyModel,
    ToyRecurrentModel,
    TurnTemplate,
    ask,
    byte_tokenizer,
    document,
    greedy_model,
    random_logits,
)

TOKENIZER = byte_tokenizer()
STOP = min(TOKENIZER.stop_ids)
RULES = TextSegment(SegmentKind.RULES, "rules;")


def random_model(**options):
    """Its next token depends on every token before it, so that no wrong page goes unseen."""
    logits = random_logits(TOKENIZER.vocab_size, never=[STOP], **options)
    return ToyModel(logits, vocab_size=TOKENIZER.vocab_size)


def text_of(length, salt=""):
    digits = itertools.chain.from_iterable(
        hashlib.sha256(f"{salt}{at}".encode()).hexdigest() for at in itertools.count()
    )
    return "".join(itertools.islice(digits, length))


@pytest.mark.parametrize("length", [1, 249, 250, 251, 507, 600])
@pytest.mark.parametrize("chunk_tokens", [64, 512])
def test_reuse_equals_a_fresh_run_at_every_page_boundary(length, chunk_tokens):
    requests = [
        ask(f"question {at}?", RULES, document(text_of(length), "d"), max_tokens=8)
        for at in range(3)
    ]
    fresh = []
    for request in requests:
        with toy_engine(random_model(), TOKENIZER, chunk_tokens=chunk_tokens) as engine:
            fresh.append(engine.complete(request).token_ids)
    with toy_engine(random_model(), TOKENIZER, chunk_tokens=chunk_tokens) as engine:
        for at, request in enumerate(requests):
            rows_before = engine.runner.num_rows
            finished = engine.complete(request)
            assert finished.token_ids == fresh[at]
            num_reused = len(RULES.text) + length if at else 0
            assert finished.usage.cached_tokens == num_reused
            assert finished.timings.cache_n == num_reused
            assert finished.timings.prompt_n == finished.usage.prompt_tokens - num_reused
            num_rows = engine.runner.num_rows - rows_before
            assert num_rows == finished.timings.forward_rows == finished.timings.prompt_n + 7
            assert finished.miss_reason is (None if at else CacheMiss.NONE_STORED)
        engine.assert_pages_are_accounted_for()


def test_recurrent_state_is_restored_with_a_segment():
    def model():
        return ToyRecurrentModel(vocab_size=TOKENIZER.vocab_size)

    requests = [ask(f"{at}?", RULES, document(text_of(300), "d"), max_tokens=20) for at in range(3)]
    fresh = []
    for request in requests:
        with toy_engine(model(), TOKENIZER) as engine:
            fresh.append(engine.complete(request).token_ids)
    with toy_engine(model(), TOKENIZER) as engine:
        reused = [engine.complete(request) for request in requests]
    assert [finished.token_ids for finished in reused] == fresh
    assert [finished.usage.cached_tokens for finished in reused] == [0, 306, 306]


def mark_reader():
    """Answers with the mark that stands in its prompt."""

    def following(history):
        text = bytes(history)
        written = len(text) - text.rindex(b"?") - 1
        mark = re.search(rb"MARK-\w-\d{4}", text).group()
        return mark[written] if written < len(mark) else STOP

    return greedy_model(following, TOKENIZER.vocab_size)


def test_o12_no_content_crosses_documents():
    marks = {"A": "MARK-A-7731", "B": "MARK-B-2290"}
    documents = {
        name: document(text_of(300) + mark + text_of(50, name), name)
        for name, mark in marks.items()
    }

    def mark_of(name, number=0):
        return ask(f"{number}: what is the mark?", RULES, documents[name], name=f"{name}{number}")

    with toy_engine(mark_reader(), TOKENIZER, max_slots=16) as engine:
        cached = []
        for name in "ABABBA":
            finished = engine.complete(mark_of(name))
            assert finished.text == marks[name]
            cached.append(finished.usage.cached_tokens)
        whole = len(RULES.text) + len(documents["A"].text)
        assert cached == [0, len(RULES.text), whole, whole, whole, whole]
        names = ["A", "B"] * 8
        answers = engine.complete_all([mark_of(name, at) for at, name in enumerate(names)])
        assert [finished.text for finished in answers] == [marks[name] for name in names]
        engine.assert_pages_are_accounted_for()


def test_o15_volatile_text_behind_the_document_does_not_break_reuse():
    def time_reader(history):
        text = bytes(history)
        written = len(text) - text.rindex(b"?") - 1
        time = re.search(rb"It is (.*?)\.", text).group(1)
        return time[written] if written < len(time) else STOP

    with toy_engine(greedy_model(time_reader, TOKENIZER.vocab_size), TOKENIZER) as engine:
        for second, num_reused in ((1, 0), (2, 2006)):
            time = f"2026-11-30 10:00:0{second}"
            request = ask(f"It is {time}. What time is it?", RULES, document(text_of(2000), "d"))
            finished = engine.complete(request)
            assert finished.text == time
            assert finished.usage.cached_tokens == num_reused


def test_o16_back_to_the_document_boundary_after_each_ask():
    """Earlier turns differ from what was generated, as where a template drops the thinking."""
    shown = document(text_of(700), "d")

    def request(number):
        turns = [ChatMessage("user", (RULES, shown, TextSegment(SegmentKind.QUESTION, "first?")))]
        for at in range(number):
            turns.append(ChatMessage("assistant", (TextSegment(SegmentKind.CONVERSATION, "so"),)))
            turns.append(ChatMessage("user", (TextSegment(SegmentKind.QUESTION, f"then {at}?"),)))
        return GenerateRequest(str(number), tuple(turns), max_tokens=10)

    fresh = []
    for number in range(3):
        with toy_engine(random_model(), TOKENIZER, template=TurnTemplate()) as engine:
            fresh.append(engine.complete(request(number)).token_ids)
    with toy_engine(random_model(), TOKENIZER, template=TurnTemplate()) as engine:
        contents = set()
        for number in range(3):
            finished = engine.complete(request(number))
            assert finished.token_ids == fresh[number]
            prompt = compile_prompt(request(number).messages, TurnTemplate(), TOKENIZER)
            segments = [segment.token_ids for segment in prompt.segments[:2]]
            assert finished.usage.cached_tokens == (prompt.ends[1] if number else 0)
            hit = engine.store.lookup(segments, identity="toy", namespace="")
            assert isinstance(hit, SegmentHit)
            assert hit.reason is None
            keys = engine.pages.exact.keys(0)[list(hit.segment.pages)].flatten()[: hit.segment.end]
            contents.add(tuple(keys.tolist()))
        assert len(contents) == 1


def test_conversation_turns_are_reused_up_to_the_newest():
    def request(*turns):
        messages = tuple(
            ChatMessage(
                "assistant" if at % 2 else "user", (TextSegment(SegmentKind.CONVERSATION, turn),)
            )
            for at, turn in enumerate(turns)
        )
        return GenerateRequest("c", messages, max_tokens=2)

    with toy_engine(random_model(), TOKENIZER, template=TurnTemplate()) as engine:
        engine.complete(request("hello"))
        finished = engine.complete(request("hello", "hi", "how are you?"))
        assert finished.usage.cached_tokens == 1 + len("user:hello")
        assert finished.miss_reason is CacheMiss.NONE_STORED
        again = engine.complete(request("hello", "hi", "how are you?"))
        assert again.miss_reason is None
        assert again.usage.cached_tokens == again.usage.prompt_tokens - len("assistant:") - 2


def test_namespaces_share_nothing():
    with toy_engine(random_model(), TOKENIZER) as engine:
        shown = document(text_of(300), "d")
        for namespace in ("a", "b"):
            finished = engine.complete(ask("?", RULES, shown, namespace=namespace, max_tokens=4))
            assert finished.usage.cached_tokens == 0
            assert finished.miss_reason is CacheMiss.NONE_STORED


def test_a_request_that_may_not_be_kept_neither_stores_nor_reuses():
    with toy_engine(random_model(), TOKENIZER) as engine:
        shown = document(text_of(300), "d")
        for _ in range(2):
            finished = engine.complete(ask("?", RULES, shown, cache=False, max_tokens=4))
            assert finished.usage.cached_tokens == 0
            assert finished.miss_reason is CacheMiss.DISABLED
        assert engine.allocators.num_free == engine.allocators.num_pages


def test_stored_segments_make_room_for_new_requests():
    with toy_engine(random_model(), TOKENIZER, num_pages=8) as engine:
        for at in range(12):
            shown = document(text_of(700, str(at)), f"d{at}")
            assert len(engine.complete(ask("?", RULES, shown, max_tokens=5)).token_ids) == 5
        evicted = engine.complete(ask("?", RULES, document(text_of(700, "0"), "d0"), max_tokens=5))
        assert evicted.miss_reason is CacheMiss.EVICTED
        engine.assert_pages_are_accounted_for()


def test_a_request_that_needs_every_page_gets_them():
    with toy_engine(random_model(looks_back=2), TOKENIZER, num_pages=2) as engine:
        shown = document(text_of(230), "d")
        engine.complete(ask("?", RULES, shown, max_tokens=5))
        finished = engine.complete(ask("?", RULES, shown, max_tokens=10**6))
        assert finished.usage.prompt_tokens + finished.usage.completion_tokens == 2 * 256
        engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_dropped_document_is_not_reused(is_under_way):
    model = random_model()
    shown = document(text_of(300), "d")
    with toy_engine(model, TOKENIZER, chunk_tokens=100) as engine:
        if is_under_way:
            reached, resume = threading.Event(), threading.Event()

            def pause():
                if len(model.steps) == 2:
                    reached.set()
                    resume.wait()

            model.before_forward = pause
            engine.submit(ask("?", RULES, shown, max_tokens=4))
            reached.wait()
            dropped = engine.worker.drop_source("d")
            resume.set()
            assert dropped.result() == 0
        else:
            engine.complete(ask("?", RULES, shown, max_tokens=4))
            assert engine.worker.drop_source("d").result() == 1
        finished = engine.complete(ask("?", RULES, shown, max_tokens=4))
        assert finished.usage.cached_tokens == len(RULES.text)


def test_a_document_dropped_while_its_prompt_is_compiled_is_not_stored():
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with toy_engine(random_model(), TOKENIZER, chunk_tokens=100) as engine:
        shown = document(text_of(300), "d")
        job = engine.client._prepare(ask("?", RULES, shown, max_tokens=4), ended.put, 0.0)
        assert engine.worker.drop_source("d").result() == 0
        engine.worker.submit(job)
        while not isinstance(ended.get(), Finished):
            pass
        assert len(engine.store) == 1, "the rules alone are kept"
        finished = engine.complete(ask("?", RULES, shown, max_tokens=4))
        assert finished.usage.cached_tokens == len(RULES.text)


def test_a_prompt_can_be_read_ahead_without_an_answer():
    with toy_engine(random_model(), TOKENIZER) as engine:
        shown = document(text_of(300), "d")
        ahead = engine.complete(ask("?", RULES, shown, max_tokens=0))
        assert (ahead.text, ahead.token_ids) == ("", ())
        assert engine.complete(ask("what?", RULES, shown, max_tokens=4)).usage.cached_tokens == 306
