import logging
import threading
from dataclasses import asdict

from ragflash import log
from ragflash.engine.request import DraftMode
from tests.engine.harness import toy_engine
from tests.engine.toys import ask, byte_tokenizer, chain, document, greedy_model

TOKENIZER = byte_tokenizer()


def following(history):
    return ord("a") + len(history) % 7


def test_what_was_done_is_summed_up():
    model = greedy_model(following, TOKENIZER.vocab_size)
    with toy_engine(model, TOKENIZER, draft=chain(following), draft_tokens=3) as engine:
        for _ in range(2):
            last = engine.complete(ask("why?", document("d" * 300, "d"), max_tokens=8))
        stats = engine.client.stats()
        assert engine.core.is_idle
    assert (stats.finished, stats.failed) == (2, 0)
    assert (stats.prompt_tokens, stats.cached_tokens) == (608, 300)
    assert last.usage.cached_tokens == 300
    assert stats.completion_tokens == 16
    assert (stats.drafted_tokens, stats.accepted_tokens) == ({"stub": 10}, {"stub": 10})
    assert (stats.forward_steps, stats.forward_rows) == (
        engine.runner.num_forwards,
        engine.runner.num_rows,
    )
    assert (stats.segments, stats.pages_used, stats.pages) == (1, 2, 64)
    assert (stats.running, stats.waiting, stats.queued, stats.evictions) == (0, 0, 0, 0)


def test_what_runs_and_waits_is_seen_from_outside():
    model = greedy_model(following, TOKENIZER.vocab_size)
    inside, go_on = threading.Event(), threading.Event()

    def stop_once():
        inside.set()
        assert go_on.wait(10)

    model.before_forward = stop_once
    with toy_engine(model, TOKENIZER, max_slots=2) as engine:
        engine.submit(ask("0?", name="0", max_tokens=4))
        assert inside.wait(10)
        for at in range(1, 5):
            engine.submit(ask(f"{at}?", name=str(at), max_tokens=4))
        stats = engine.client.stats()
        go_on.set()
        engine.complete(ask("last"))
    assert (stats.running, stats.waiting, stats.queued) == (1, 0, 4)
    assert stats.pages_used == 1


def test_failures_and_evictions_are_counted():
    model = greedy_model(following, TOKENIZER.vocab_size)
    with toy_engine(model, TOKENIZER, num_pages=3) as engine:
        for name in "abc":
            engine.complete(ask("?", document(name * 300, name), max_tokens=4))
        job, _ = engine.submit(ask("?", name="gone", max_tokens=4, draft=DraftMode.OFF))
        job.cancelled.set()
        engine.complete(ask("last", max_tokens=1))
        stats = asdict(engine.client.stats())
    assert stats["evictions"] >= 1
    assert stats["finished"] + stats["failed"] == 5


def test_what_the_engine_logs_names_the_http_request(caplog):
    model = greedy_model(following, TOKENIZER.vocab_size)
    token = log.request_id.set("trace-7")
    with toy_engine(model, TOKENIZER, num_pages=2) as engine, caplog.at_level(logging.INFO):
        engine.complete(ask("?", document("d" * 300, "d"), max_tokens=4, name="chat-1"))
    log.request_id.reset(token)
    lines = [(line.getMessage(), line.request_id, line.generation) for line in caplog.records]
    assert lines == [
        ("prompt admitted", "trace-7", "chat-1"),
        ("segment not stored: no page is free", "trace-7", "chat-1"),
    ]
