"""Overload, failure, cancellation and shutdown: every request gets exactly one end."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragflash.engine.constraint import Literal
from ragflash.engine.request import (
    Delta,
    Failed,
    Finished,
    ScoreRequest,
)
from ragflash.engine.worker import Worker
from ragflash.errors import EngineDead, EngineOverloaded, GenerationCancelled, InputError
from tests.engine.harness import toy_engine
from tests.engine.toys import ToyModel, ask, byte_tokenizer, document, random_logits

TOKENIZER = byte_tokenizer()


def random_model(**options):
    vocab_size = TOKENIZER.vocab_size
    logits = random_logits(vocab_size, looks_back=4, never=TOKENIZER.stop_ids)
    return ToyModel(logits, vocab_size=vocab_size, **options)


class Pause:
    """Holds the worker before one of the model's forwards until told to go on."""

    def __init__(self, model, *, before_forward=0):
        self.reached, self._resume = threading.Event(), threading.Event()
        self._model, self._at = model, before_forward
        model.before_forward = self

    def __call__(self):
        if len(self._model.steps) == self._at:
            self.reached.set()
            self._resume.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._resume.set()


def ends(events):
    return [event for event in events if isinstance(event, Finished | Failed)]


def test_a_full_queue_refuses_and_takes_again_when_served():
    model = random_model()
    with toy_engine(model, TOKENIZER, max_slots=1, max_in_flight=2) as engine:
        with Pause(model):
            accepted = [engine.submit(ask("?", name=str(at), max_tokens=3)) for at in range(2)]
            with pytest.raises(EngineOverloaded):
                engine.submit(ask("?"))
            with pytest.raises(EngineOverloaded):
                engine.complete(ask("?"))
        while not all(ends(events) for _, events in accepted):
            engine.worker.drop_source("nothing").result()
        assert engine.complete(ask("?", max_tokens=3)).usage.completion_tokens == 3


def test_a_failing_model_ends_all_in_flight_once_each():
    model = random_model()
    with toy_engine(model, TOKENIZER, max_slots=2) as engine:
        with Pause(model) as pause:
            running = [engine.submit(ask("?", name=str(at))) for at in range(4)]
            pause.reached.wait()

            def fail():
                if len(model.steps) == 3:
                    raise ZeroDivisionError("the device is gone")

            model.before_forward = fail
        engine.worker._thread.join()
        for _, events in running:
            (end,) = ends(events)
            assert end is events[-1]
            assert isinstance(end.error, EngineDead)
            assert "the device is gone" in str(end.error)
        assert not engine.client.is_alive
        with pytest.raises(EngineDead):
            engine.complete(ask("?"))
        with pytest.raises(EngineDead):
            asyncio.run(engine.client.drop_source("d"))


def test_shutdown_cancels_what_is_in_flight():
    model = random_model()
    with toy_engine(model, TOKENIZER, max_slots=1) as engine:
        with Pause(model):
            running = [engine.submit(ask("?", name=str(at))) for at in range(3)]
            closing = threading.Thread(target=engine.client.close)
            closing.start()
        closing.join()
        for _, events in running:
            (end,) = ends(events)
            assert isinstance(end, Finished) or isinstance(end.error, GenerationCancelled)
        assert ends(running[2][1])[0].error.code == "cancelled"
        assert not engine.client.is_alive


async def cancel_during(engine, request, pause):
    """Read a request's events and go away once the worker is held."""
    events = []

    async def read():
        async for event in engine.client.generate(request):
            events.append(event)  # noqa: PERF401 - what came before the cancellation counts

    reading = asyncio.create_task(read())
    await asyncio.to_thread(pause.reached.wait)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    return events


def test_o30_cancel_during_reading_stops_within_a_chunk():
    model = random_model()
    request = ask("?", document("x" * 100_000, "d"))
    with toy_engine(model, TOKENIZER, num_pages=400, chunk_tokens=2048, max_slots=1) as engine:
        with Pause(model, before_forward=4) as pause:
            events = asyncio.run(cancel_during(engine, request, pause))
        assert events, "progress is reported while reading"
        assert not ends(events)
        engine.worker.drop_source("nothing").result()
        after = engine.complete(ask("next?", max_tokens=3))
        assert len(model.steps) == 5 + 3, "the chunk under way was the last one"
        assert after.usage.cached_tokens == 0
        again = engine.submit(request)[0]
        hit = engine.store.lookup(
            [segment.token_ids for segment in again.prompt.segments[:1]],
            identity="toy",
            namespace="",
        )
        again.cancelled.set()
        assert not hasattr(hit, "segment"), "a document read in part is not kept as a whole"


def test_o30_cancel_while_queued_never_starts():
    model = random_model()
    with toy_engine(model, TOKENIZER, max_slots=1) as engine:
        with Pause(model) as pause:
            engine.submit(ask("first?", name="first", max_tokens=3))
            pause.reached.wait()
            job, events = engine.submit(ask("queued?", name="queued", max_tokens=3))
            job.cancelled.set()
        engine.complete(ask("next?", max_tokens=3))
        (end,) = events
        assert isinstance(end.error, GenerationCancelled)
        assert len(model.steps) == 6


def test_o30_cancel_while_streaming_frees_the_slot():
    model = random_model()
    request = ask("?", max_tokens=10_000)
    with toy_engine(model, TOKENIZER, max_slots=1) as engine:
        with Pause(model, before_forward=5) as pause:
            events = asyncio.run(cancel_during(engine, request, pause))
        assert any(isinstance(event, Delta) for event in events)
        assert engine.complete(ask("next?", max_tokens=3)).usage.completion_tokens == 3
        assert len(model.steps) == 6 + 3
        engine.assert_pages_are_accounted_for()


def test_closing_the_iterator_cancels():
    model = random_model()
    with toy_engine(model, TOKENIZER) as engine:

        async def read_one():
            events = engine.client.generate(ask("?", max_tokens=10_000))
            async for _ in events:
                break
            await events.aclose()

        asyncio.run(read_one())
        engine.complete(ask("next?", max_tokens=1))
        assert engine.core.is_idle


def test_refused_requests_leave_no_trace():
    with toy_engine(random_model(), TOKENIZER, max_in_flight=1) as engine:
        for bad in (ask("?", max_tokens=-1), ask(""), ask("?", constraint=Literal(""))):
            with pytest.raises(InputError):
                engine.complete(bad)
        assert engine.complete(ask("?", max_tokens=1)).usage.completion_tokens == 1


def test_client_says_what_it_can():
    with toy_engine(random_model(), TOKENIZER) as engine:
        client = engine.client
        assert client.is_alive
        assert client.info().model == "toy"
        assert client.tokenize("ab") == (97, 98)
        assert client.count_tokens(ask("ab", document("c", "d")).messages) == 3
        score = ScoreRequest("s", ask("?").messages, ("a",))
        assert asyncio.run(client.score(score)).num_tokens == (1,)
        assert asyncio.run(client.drop_source("d")) == 0


def test_what_the_engine_fails_at_as_it_is_handed_over_is_told_of_it():
    def fails(*_):
        raise ValueError("no")

    with toy_engine(random_model(), TOKENIZER) as engine:
        engine.scheduler.add = fails
        with pytest.raises(EngineDead, match="ValueError: no"):
            engine.complete(ask("?"))
        assert not engine.client.is_alive
    with toy_engine(random_model(), TOKENIZER) as engine:
        engine.store.drop_source = fails
        with pytest.raises(EngineDead, match="ValueError: no"):
            engine.worker.drop_source("d").result(timeout=30)


def test_a_worker_is_awaited_until_it_has_prepared_itself():
    began, may_go_on = threading.Event(), threading.Event()

    def prepare():
        began.set()
        may_go_on.wait()

    with toy_engine(random_model(), TOKENIZER) as engine:
        worker = Worker(engine.core, max_in_flight=1, prepare=prepare)
        assert began.wait(10)
        with ThreadPoolExecutor() as pool:
            awaited = pool.submit(worker.awaited)
            assert not awaited.done()
            may_go_on.set()
            assert awaited.result(10) is worker
        worker.close()


def test_what_fails_while_preparing_is_told_to_who_waits():
    def prepare():
        raise RuntimeError("no plan")

    with toy_engine(random_model(), TOKENIZER) as engine:
        worker = Worker(engine.core, max_in_flight=1, prepare=prepare)
        with pytest.raises(EngineDead):
            worker.awaited()
