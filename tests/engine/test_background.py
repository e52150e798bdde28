"""A background request runs while no other does, and stands in nobody's way."""

import threading

import pytest

from ragflash.engine.request import Finished, PrefillProgress, SegmentKind, TextSegment
from tests.engine.harness import toy_engine
from tests.engine.toys import ToyModel, ask, byte_tokenizer, document, random_logits

TOKENIZER = byte_tokenizer()
LONG = document("long " * 200, "long")  # 1,000 tokens: ten chunks
SHORT = document("short " * 40, "short")
RULES = TextSegment(SegmentKind.RULES, "rules;")


def model() -> ToyModel:
    logits = random_logits(TOKENIZER.vocab_size, looks_back=8, never=TOKENIZER.stop_ids)
    return ToyModel(logits, vocab_size=TOKENIZER.vocab_size)


class Meeting:
    """Calls a function on the worker thread, before a certain forward."""

    def __init__(self, model: ToyModel, step: int, call) -> None:
        self.model, self.step, self.call = model, step, call
        model.before_forward = self._look

    def _look(self) -> None:
        if len(self.model.steps) == self.step:
            self.call()


def ahead(**options):
    return ask(".", RULES, LONG, name="ahead", max_tokens=0, background=True, **options)


def submit(engine, request, emitted):
    """Submit from any thread; each event is put with the number of forwards before it."""
    done = threading.Event()

    def emit(event):
        emitted.append((engine.runner.num_forwards, event))
        if isinstance(event, Finished):
            done.set()

    engine.worker.submit(engine.client._prepare(request, emit, 0.0))
    return done


@pytest.mark.parametrize("max_slots", [1, 2])
def test_who_comes_meanwhile_waits_for_no_more_than_a_chunk(max_slots):
    toy, emitted, others = model(), [], []
    with toy_engine(toy, TOKENIZER, chunk_tokens=100, max_slots=max_slots) as engine:
        came = []
        Meeting(toy, 4, lambda: came.append(submit(engine, ask("?", SHORT, max_tokens=3), others)))
        assert submit(engine, ahead(), emitted).wait(30)
        assert came[0].wait(30)
        first, last = others[0][0], others[-1][0]
        assert first == 6, "the chunk under way, and the first of its own"
        between = [at for at, event in emitted if first <= at <= last]
        assert between == [], "nothing of the background is computed until it has ended"
        finished = emitted[-1][1]
        assert finished.usage.prompt_tokens == len(RULES.text) + 1001
        stored = engine.complete(ask("?", RULES, LONG, max_tokens=1))
        assert stored.usage.cached_tokens >= 1000
        engine.assert_pages_are_accounted_for()


def test_a_paused_one_goes_on_where_it_was():
    toy, emitted, others = model(), [], []
    with toy_engine(toy, TOKENIZER, chunk_tokens=100) as engine:
        Meeting(toy, 4, lambda: submit(engine, ask("?", SHORT, max_tokens=3), others))
        assert submit(engine, ahead(), emitted).wait(30)
        done = [event.done for _, event in emitted if isinstance(event, PrefillProgress)]
        assert done == sorted(done)
        assert emitted[-1][1].timings.forward_rows == 1007


@pytest.mark.parametrize(
    ("options", "num_cached"), [({"max_slots": 1}, len(RULES.text)), ({"num_pages": 5}, 0)]
)
def test_one_whose_place_is_needed_begins_anew_with_what_is_stored(options, num_cached):
    """Where pages are short, the rules have made room before."""
    toy, emitted, others = model(), [], []
    with toy_engine(toy, TOKENIZER, chunk_tokens=100, **options) as engine:
        wanted = ask("?", document("s" * 500, "s"), max_tokens=3)
        came = []
        Meeting(toy, 4, lambda: came.append(submit(engine, wanted, others)))
        assert submit(engine, ahead(), emitted).wait(30)
        assert came[0].is_set()
        finished = emitted[-1][1]
        assert finished.usage.cached_tokens == num_cached
        assert finished.timings.forward_rows > 1007
        engine.assert_pages_are_accounted_for()


def test_what_others_have_read_meanwhile_is_not_read_again():
    toy, emitted, others = model(), [], []
    with toy_engine(toy, TOKENIZER, chunk_tokens=100) as engine:
        Meeting(toy, 4, lambda: submit(engine, ask("?", RULES, LONG, max_tokens=3), others))
        assert submit(engine, ahead(), emitted).wait(30)
        finished = emitted[-1][1]
        assert finished.usage.cached_tokens == 1006
        assert finished.timings.forward_rows == 406 + 1, "four chunks, the rules and the last token"
        engine.assert_pages_are_accounted_for()


def test_whoever_is_at_work_holds_it_off_also_between_requests():
    emitted = []
    with toy_engine(model(), TOKENIZER, chunk_tokens=100) as engine:
        with engine.client.attended():
            done = submit(engine, ahead(), emitted)
            for _ in range(3):
                engine.complete(ask("?", SHORT, max_tokens=2))
            assert emitted == []
            assert not done.is_set()
        assert done.wait(30)


def test_it_is_held_off_until_the_last_one_lets_go():
    emitted = []
    with toy_engine(model(), TOKENIZER) as engine:
        with engine.client.attended():
            with engine.client.attended():
                done = submit(engine, ahead(), emitted)
            engine.complete(ask("?", SHORT, max_tokens=2))
            assert emitted == []
        assert done.wait(30)


def test_background_requests_come_last_and_one_by_one():
    order = []
    gate = threading.Event()
    with toy_engine(model(), TOKENIZER, gate=gate) as engine:
        events = [
            submit(engine, ask(".", LONG, name="b1", max_tokens=0, background=True), order),
            submit(engine, ask(".", SHORT, name="b2", max_tokens=0, background=True), order),
            submit(engine, ask("?", SHORT, name="f1", max_tokens=2), order),
            submit(engine, ask("!", SHORT, name="f2", max_tokens=2), order),
        ]
        gate.set()
        assert all(event.wait(30) for event in events)
    ends = [event.request_id for _, event in order if isinstance(event, Finished)]
    assert ends[2:] == ["b1", "b2"]
    assert {*ends[:2]} == {"f1", "f2"}
