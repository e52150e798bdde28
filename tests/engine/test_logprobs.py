"""Log-probabilities are those of the distribution, one a token, with and without drafts."""

import math
import string

import pytest
import torch

from ragflash.engine.constraint import Choice, Free, Literal
from ragflash.engine.request import (
    Delta,
    DraftMode,
    FinishReason,
    SamplingParams,
)
from ragflash.errors import InputError
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    ToyModel,
    ToyTokenizer,
    ask,
    byte_tokenizer,
    chain,
    greedy_model,
    random_logits,
)

P = [0.5, 0.3, 0.2]
TOKENIZER = byte_tokenizer("the", " and", "é")
VOCAB = TOKENIZER.vocab_size


def letters(count):
    return ToyTokenizer([letter.encode() for letter in string.ascii_letters[:count]])


def three_letters(**options):
    model = ToyModel(lambda _: torch.tensor(P).log(), vocab_size=3)
    with toy_engine(model, letters(3)) as engine:
        return engine.complete(ask("a", **{"max_tokens": 6, "logprobs": True, **options}))


def test_known_probabilities():
    finished = three_letters(sampling=SamplingParams(temperature=1.0, seed=1), top_logprobs=2)
    assert len(finished.logprobs) == 6
    assert len(set(finished.token_ids)) > 1
    for token_id, told in zip(finished.token_ids, finished.logprobs, strict=True):
        assert told.chosen.token_id == token_id
        assert told.chosen.data == b"abc"[token_id : token_id + 1]
        assert told.chosen.logprob == pytest.approx(math.log(P[token_id]), abs=1e-6)
        assert [other.token_id for other in told.top] == [0, 1]
        assert told.top[1].logprob == pytest.approx(math.log(0.3), abs=1e-6)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 1}])
def test_temperature_and_cuts_do_not_count(params):
    finished = three_letters(sampling=SamplingParams(**params))
    assert [told.chosen.logprob for told in finished.logprobs] == pytest.approx(
        [math.log(0.5)] * 6, abs=1e-6
    )
    assert [told.top for told in finished.logprobs] == [()] * 6


def test_penalties_and_bias_count():
    sampling = SamplingParams(frequency_penalty=2.0, logit_bias=((2, 1.0),))
    first, second, *_ = three_letters(sampling=sampling).logprobs
    biased = [0.5, 0.3, 0.2 * math.e]
    assert first.chosen.token_id == 2
    assert first.chosen.logprob == pytest.approx(math.log(biased[2] / sum(biased)), abs=1e-6)
    biased[2] *= math.exp(-2)
    assert second.chosen.token_id == 0
    assert second.chosen.logprob == pytest.approx(math.log(biased[0] / sum(biased)), abs=1e-6)


@pytest.mark.parametrize("token_id", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_forces_or_bans_a_token(token_id, temperature):
    def sampled(bias):
        sampling = SamplingParams(temperature=temperature, seed=3, logit_bias=((token_id, bias),))
        return set(three_letters(sampling=sampling, max_tokens=50).token_ids)

    assert sampled(100.0) == {token_id}
    assert token_id not in sampled(-100.0)


def test_bias_of_a_token_that_the_model_lacks_is_refused():
    for token_id in (-1, 3):
        with pytest.raises(InputError, match="0 to 2"):
            three_letters(sampling=SamplingParams(logit_bias=((token_id, 1.0),)))


def test_none_unless_asked_for():
    assert three_letters(logprobs=False).logprobs == ()


def sampled_request(seed, mode, **options):
    sampling = SamplingParams(
        temperature=0.7, top_p=0.9, seed=seed, frequency_penalty=0.5, repetition_penalty=1.2
    )
    return ask(
        "?", max_tokens=40, sampling=sampling, draft=mode, logprobs=True, top_logprobs=3, **options
    )


@pytest.mark.parametrize("greedy", [False, True])
def test_drafts_change_no_log_probability(greedy):
    """Drafts are right, wrong, or cut off; whatever becomes of them, each token's is the same."""
    plain = []
    for mode in (DraftMode.OFF, DraftMode.AUTO):
        model = ToyModel(random_logits(VOCAB, never=TOKENIZER.stop_ids), vocab_size=VOCAB)
        request = sampled_request(4, mode)
        if greedy:
            request = ask("?", max_tokens=40, draft=mode, logprobs=True, top_logprobs=3)

        def draft(history, budget):
            right = plain[0].token_ids[len(history) - 1 :][:3]
            return [*right, 65, 66][:budget]

        with toy_engine(model, TOKENIZER, draft=draft) as engine:
            plain.append(engine.complete(request))
    assert plain[1].timings.draft_n_accepted > 20
    assert plain[0].token_ids == plain[1].token_ids
    assert plain[0].logprobs == plain[1].logprobs
    assert len(plain[0].logprobs) == 40


@pytest.mark.parametrize("stop", [(), ("e",), ("the", "zz"), ("é",)])
def test_streamed_equals_whole(stop):
    for seed in range(4):
        model = ToyModel(random_logits(VOCAB, looks_back=4), vocab_size=VOCAB)
        with toy_engine(model, TOKENIZER) as engine:
            *events, finished = engine.events(sampled_request(seed, DraftMode.OFF, stop=stop))
        streamed = [told for event in events if isinstance(event, Delta) for told in event.logprobs]
        assert tuple(streamed) == finished.logprobs[: finished.num_shown]
        assert len(finished.logprobs) == len(finished.token_ids) == finished.usage.completion_tokens
        shown = b"".join(told.chosen.data for told in streamed).decode(errors="replace")
        assert shown.startswith(finished.text)


@pytest.mark.parametrize(
    ("stop", "reason", "num_tokens", "num_shown"),
    [
        (("§§",), FinishReason.STOP, 3, 2),
        (("Z",), FinishReason.LENGTH, 5, 5),
        (("B§",), FinishReason.STOP, 3, 1),
        (("§X",), FinishReason.STOP, 4, 3),  # the third token is shown in part
    ],
)
def test_o01_the_list_ends_with_the_emitted_tokens(stop, reason, num_tokens, num_shown):
    tokenizer = ToyTokenizer([piece.encode() for piece in ["A", "B", "§§", "X", "Y", "Z", "?"]])

    def following(history):
        return len(history) - 1

    model = greedy_model(following, 7)
    with toy_engine(model, tokenizer, draft=chain(following)) as engine:
        finished = engine.complete(ask("?", stop=stop, max_tokens=5, logprobs=True))
    assert finished.reason is reason
    assert [told.chosen.token_id for told in finished.logprobs] == [*range(num_tokens)]
    assert finished.token_ids == tuple(range(num_tokens))
    assert finished.num_shown == num_shown


def test_a_stop_token_has_a_log_probability_and_no_text():
    end = min(TOKENIZER.stop_ids)
    answer = [*"é!".encode(), end]
    model = greedy_model(lambda history: answer[len(history) - 1], VOCAB)
    with toy_engine(model, TOKENIZER) as engine:
        *events, finished = engine.events(ask("?", logprobs=True))
    assert [told.chosen.token_id for told in finished.logprobs] == answer
    assert finished.num_shown == 3
    assert [len(event.logprobs) for event in events if isinstance(event, Delta)] == [2, 1]


def test_what_a_constraint_decides_is_certain():
    constraint = (Literal("yes: "), Choice(("north", "south")), Free(max_tokens=2))
    model = ToyModel(random_logits(VOCAB), vocab_size=VOCAB)
    with toy_engine(model, TOKENIZER) as engine:
        finished = engine.complete(
            ask("?", constraint=constraint, logprobs=True, top_logprobs=20, max_tokens=12)
        )
    values = [told.chosen.logprob for told in finished.logprobs]
    assert len(values) == len(finished.token_ids)
    assert values[:5] == [0.0] * 5
    assert values[5] < 0
    assert sum(math.exp(other.logprob) for other in finished.logprobs[5].top) == pytest.approx(1)
    assert {other.data for other in finished.logprobs[5].top} == {b"n", b"s"}
    assert values[6:10] == [0.0] * 4
