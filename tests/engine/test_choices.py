"""Several outputs of one prompt: read once, drawn apart, the same again."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from ragflash.engine.choices import derived_seed, generate_choices, total_timings, total_usage
from ragflash.engine.request import Finished, SamplingParams
from ragflash.errors import ContextTooLong, EngineOverloaded
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    ToyModel,
    ToyRecurrentModel,
    ask,
    byte_tokenizer,
    document,
    random_logits,
)

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size
SAMPLED = SamplingParams(temperature=1.0, seed=11)


def random_model():
    return ToyModel(random_logits(VOCAB, never=TOKENIZER.stop_ids), vocab_size=VOCAB)


def request(**options):
    text = document("d" * 300, "d")
    return ask("q" * 300, text, **{"max_tokens": 8, "sampling": SAMPLED, **options})


async def collect(engine, asked, n):
    async with aclosing(generate_choices(engine.client, asked, n)) as events:
        ends = {number: event async for number, event in events if isinstance(event, Finished)}
    return [ends[number] for number in range(n)]


def test_three_choices_differ_and_come_again_whatever_runs_beside():
    outputs = []
    for slots in (1, 4):
        with toy_engine(random_model(), TOKENIZER, max_slots=slots) as engine:

            async def beside(engine=engine):
                other = ask("something else", name="other", max_tokens=30)
                found, _ = await asyncio.gather(
                    collect(engine, request(), 3), engine.client.complete(other)
                )
                return found

            outputs.append([end.token_ids for end in asyncio.run(beside())])
            engine.assert_pages_are_accounted_for()
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) == 3


@pytest.mark.parametrize("model", [random_model, lambda: ToyRecurrentModel(vocab_size=VOCAB)])
def test_each_choice_is_what_its_seed_gives_alone(model):
    with toy_engine(model(), TOKENIZER) as engine:
        ends = asyncio.run(collect(engine, request(), 3))
    for number, end in enumerate(ends):
        with toy_engine(model(), TOKENIZER) as engine:
            seed = derived_seed(11, number)
            alone = engine.complete(request(sampling=replace(SAMPLED, seed=seed)))
        assert end.token_ids == alone.token_ids


@pytest.mark.parametrize("n", [2, 8])
def test_the_prompt_is_read_once(n):
    with toy_engine(random_model(), TOKENIZER, max_slots=3) as engine:
        ends = asyncio.run(collect(engine, request(), n))
        decoded = n * 7  # the last of 8 tokens is not fed back
        assert engine.runner.num_rows == 600 + (n - 1) + decoded
    assert [end.usage.cached_tokens for end in ends] == [0] + [599] * (n - 1)
    usage = total_usage(ends)
    assert (usage.prompt_tokens, usage.completion_tokens) == (600, 8 * n)
    assert usage.cached_tokens == 0
    timings = total_timings(ends)
    assert (timings.prompt_n, timings.predicted_n) == (600, 8 * n)
    assert timings.forward_rows == engine.runner.num_rows


def test_a_pool_without_room_to_share_still_gives_every_choice():
    with toy_engine(random_model(), TOKENIZER, num_pages=3) as engine:
        ends = asyncio.run(collect(engine, request(), 2))
        engine.assert_pages_are_accounted_for()
    assert ends[0].token_ids != ends[1].token_ids
    assert ends[1].usage.cached_tokens in {0, 300}


def test_one_choice_is_the_request_itself():
    with toy_engine(random_model(), TOKENIZER) as engine:
        (end,) = asyncio.run(collect(engine, request(), 1))
        assert end.request_id == "r"
        assert end.token_ids == engine.complete(request()).token_ids


def test_refusals_are_raised_and_nothing_is_left_running():
    with toy_engine(random_model(), TOKENIZER, num_pages=2) as engine:
        with pytest.raises(ContextTooLong):
            asyncio.run(collect(engine, request(), 3))
        assert engine.core.is_idle
    with (
        toy_engine(random_model(), TOKENIZER, max_in_flight=2) as engine,
        pytest.raises(EngineOverloaded),
    ):
        asyncio.run(collect(engine, request(max_tokens=200), 3))


def test_leaving_cancels_every_choice():
    with toy_engine(random_model(), TOKENIZER) as engine:

        async def leave():
            async with aclosing(
                generate_choices(engine.client, request(max_tokens=400), 3)
            ) as events:
                async for number, _ in events:
                    if number == 2:
                        return

        asyncio.run(leave())
        engine.complete(ask("next"))
        engine.assert_pages_are_accounted_for()
