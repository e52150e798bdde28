"""Requests run together as if each were alone."""

import threading

import pytest

from ragflash.engine.request import Delta, Finished, PrefillProgress, SamplingParams
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    ToyModel,
    ask,
    byte_tokenizer,
    chain,
    document,
    greedy_model,
    random_logits,
)

TOKENIZER = byte_tokenizer("the", " and", "é")
VOCAB = TOKENIZER.vocab_size


def random_model():
    logits = random_logits(VOCAB, looks_back=4, never=TOKENIZER.stop_ids)
    return ToyModel(logits, vocab_size=VOCAB)


def requests(count=6):
    return [
        ask(
            f"question {at}" * (1 + 20 * at),
            name=str(at),
            max_tokens=5 + 4 * at,
            sampling=SamplingParams(
                temperature=0.8 * (at % 3),
                top_p=0.9,
                seed=at,
                frequency_penalty=0.3,
                repetition_penalty=1.1,
            ),
        )
        for at in range(count)
    ]


def test_batched_equals_single_whatever_the_seed_and_the_neighbours():
    single = []
    for request in requests():
        with toy_engine(random_model(), TOKENIZER) as engine:
            single.append(engine.complete(request).token_ids)
    for slots in (2, 6):
        with toy_engine(random_model(), TOKENIZER, max_slots=slots, chunk_tokens=64) as engine:
            together = engine.complete_all(requests())
            assert [finished.token_ids for finished in together] == single
            engine.assert_pages_are_accounted_for()


def test_a_seed_fixes_the_draws_and_none_does_not():
    def sampled(seed):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        with toy_engine(random_model(), TOKENIZER) as engine:
            return engine.complete(ask("?", sampling=sampling, max_tokens=30)).token_ids

    assert sampled(5) == sampled(5)
    assert sampled(5) != sampled(6)
    assert sampled(None) != sampled(None)


def test_one_forward_a_step_for_all_sequences():
    gate = threading.Event()
    model = random_model()
    with toy_engine(model, TOKENIZER, max_slots=8, gate=gate) as engine:
        submitted = [engine.submit(ask(f"{at}?", name=str(at), max_tokens=10)) for at in range(8)]
        gate.set()
        engine.complete(ask("last"))
        assert all(isinstance(events[-1], Finished) for _, events in submitted)
    assert [len(step) for step in model.steps[:10]] == [8] * 10


def test_nobody_waits_for_the_whole_prompt_of_somebody_else():
    gate = threading.Event()
    model = random_model()
    with toy_engine(model, TOKENIZER, gate=gate, chunk_tokens=100, max_slots=3) as engine:
        engine.submit(ask("short?", name="short", max_tokens=30))
        long = [engine.submit(ask("x" * 1000, name=f"long {at}", max_tokens=5)) for at in range(2)]
        gate.set()
        engine.complete(ask("last"))
    short, *others = range(3)
    decoding = model.steps[1:30]
    assert all(step.get(short) == 1 for step in decoding), "a token of the short one every step"
    chunks = [[slot for slot in others if step.get(slot) == 100] for step in decoding]
    assert chunks[:20] == [[others[at % 2]] for at in range(20)], "chunks in turn"
    for _, events in long:
        done = [event.done for event in events if isinstance(event, PrefillProgress)]
        assert done == list(range(100, 1001, 100))


def test_chunks_end_where_segments_end():
    model = random_model()
    with toy_engine(model, TOKENIZER, chunk_tokens=100) as engine:
        engine.complete(ask("what?", document("d" * 250, "d"), document("e" * 30, "e")))
    assert [step[0] for step in model.steps[:5]] == [100, 100, 50, 30, 5]


@pytest.mark.parametrize("stop", [(), ("e",), ("the", "zz"), ("é",)])
def test_streamed_equals_whole(stop):
    for seed in range(4):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        request = ask("?", max_tokens=60, stop=stop, sampling=sampling)
        with toy_engine(random_model(), TOKENIZER) as engine:
            *events, finished = engine.events(request)
        deltas = [event.text for event in events if isinstance(event, Delta)]
        assert "".join(deltas) == finished.text
        assert all(deltas)
        assert not any(text in finished.text for text in stop)


def test_one_delta_a_step():
    def following(history):
        return ord("a") + len(history) % 7

    model = greedy_model(following, VOCAB)
    with toy_engine(model, TOKENIZER, draft=chain(following), draft_tokens=7) as engine:
        events = engine.events(ask("?", max_tokens=16))
    assert [len(event.text) for event in events if isinstance(event, Delta)] == [8, 8]


def test_times_are_in_order():
    with toy_engine(random_model(), TOKENIZER) as engine:
        timings = engine.complete(ask("?", max_tokens=5)).timings
    assert 0 <= timings.queue_ms <= timings.ttft_ms
    assert timings.ttft_ms == pytest.approx(timings.queue_ms + timings.prompt_ms)
    assert timings.predicted_n == 5
    assert timings.predicted_per_second > 0
