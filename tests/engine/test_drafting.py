"""Drafting never changes the output."""

import string

import pytest
import torch

from ragflash.engine.request import DraftMode, FinishReason, SamplingParams
from ragflash.engine.sampler import draw, uniform
from ragflash.errors import ContextTooLong
from ragflash.speculative.drafter import Draft
from ragflash.speculative.verify import verify
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    ToyModel,
    ToyRecurrentModel,
    ToyTokenizer,
    ask,
    byte_tokenizer,
    chain,
    greedy_model,
)


def letters(count):
    return ToyTokenizer([letter.encode() for letter in string.ascii_letters[:count]])


@pytest.mark.parametrize(
    ("stop", "text", "reason", "num_tokens"),
    [("§§", "AB", FinishReason.STOP, 3), ("Z", "AB§§XY", FinishReason.LENGTH, 5)],
)
def test_o01_stop_string_beats_the_length_cap(stop, text, reason, num_tokens):
    pieces = ["A", "B", "§§", "X", "Y", "Z", "?"]
    tokenizer = ToyTokenizer([piece.encode() for piece in pieces])

    def following(history):
        return len(history) - 1

    model = greedy_model(following, len(pieces))
    with toy_engine(model, tokenizer, draft=chain(following)) as engine:
        finished = engine.complete(ask("?", stop=(stop,), max_tokens=5))
        assert (finished.text, finished.reason) == (text, reason)
        assert finished.token_ids == (0, 1, 2, 3, 4)[:num_tokens]
        assert finished.usage.completion_tokens == num_tokens
        assert engine.runner.num_forwards == 1
        engine.assert_pages_are_accounted_for()


def offer_sixteen(history, budget):
    return [0, 1, 2, 3] * 4


@pytest.mark.parametrize(("num_prompt", "num_new"), [(56, 8), (63, 1)])
def test_o02_block_meets_the_end_of_the_context(num_prompt, num_new):
    def following(history):
        return (history[-1] + 1) % 5

    outputs = []
    for mode in (DraftMode.AUTO, DraftMode.OFF):
        model = greedy_model(following, 5, context_tokens=64)
        draft = offer_sixteen
        with toy_engine(model, letters(5), draft=draft, draft_tokens=16) as engine:
            finished = engine.complete(ask("a" * num_prompt, max_tokens=1000, draft=mode))
        assert finished.reason is FinishReason.LENGTH
        assert len(finished.token_ids) == num_new
        outputs.append(finished.text)
    assert outputs[0] == outputs[1]


def test_o02_prompt_as_long_as_the_context_is_refused_before_any_compute():
    model = greedy_model(lambda _: 0, 5, context_tokens=64)
    with toy_engine(model, letters(5)) as engine:
        with pytest.raises(ContextTooLong) as refused:
            engine.complete(ask("a" * 64))
        assert (refused.value.prompt_tokens, refused.value.limit_tokens) == (64, 64)
        assert engine.runner.num_forwards == 0


def affine(history):
    return (3 * history[-1] + 1) % 17


O03_OUTPUT = (4, 13, 6, 2, 7, 5, 16, 15, 12, 3, 10, 14, 9, 11, 0, 1, 4, 13, 6, 2)
O03_DRAFTS = {
    "perfect": chain(affine),
    "constant": lambda _, budget: [5] * budget,
    "even positions": lambda history, budget: [
        token if at % 2 == 0 else 0 for at, token in enumerate(chain(affine)(history, budget))
    ],
    "empty": lambda *_: [],
    "invalid ids": lambda _, budget: [-1, 10**9, 17][:budget],
    "over budget": lambda history, budget: chain(affine)(history, budget + 7),
}


@pytest.mark.parametrize("num_rows", [1, 8, 16, 21])
@pytest.mark.parametrize("name", O03_DRAFTS)
def test_o03_greedy_output_does_not_depend_on_the_drafter(name, num_rows):
    model = greedy_model(affine, 17)
    draft = O03_DRAFTS[name]
    with toy_engine(model, letters(17), draft=draft, draft_tokens=num_rows - 1) as engine:
        finished = engine.complete(ask("b", max_tokens=20))
        assert finished.token_ids == O03_OUTPUT
        assert max(step[0] for step in model.steps) <= num_rows
        if name == "perfect" and num_rows == 16:
            assert engine.runner.num_forwards == 2
        if name in {"empty", "invalid ids"} or num_rows == 1:
            assert engine.runner.num_forwards == 20
            assert finished.timings.draft_n == 0


def test_drafter_is_told_what_was_accepted():
    model = greedy_model(affine, 17)

    def draft(history, budget):
        return [*chain(affine)(history, 2), 0, 0][:budget]

    with toy_engine(model, letters(17), draft=draft, draft_tokens=4) as engine:
        finished = engine.complete(ask("b", max_tokens=6))
        assert engine.drafters[0].observed == [(4, 2), (2, 2)]
        assert (finished.timings.draft_n, finished.timings.draft_n_accepted) == (6, 4)


def takes_all(emitted):
    def emit(token):
        emitted.append(token)
        return True

    return emit


@pytest.mark.parametrize(
    ("num_draws", "tolerance"),
    [(10_000, 0.01), pytest.param(200_000, 0.005, marks=pytest.mark.slow)],
)
def test_o04_sampling_keeps_the_target_distribution_with_looked_up_drafts(num_draws, tolerance):
    p = torch.tensor([0.5, 0.3, 0.2])
    counts, accepted, after_rejection = [0, 0, 0], 0, [0, 0, 0]
    for position in range(num_draws):
        emitted = []
        choose = [draw(p, uniform(7, position)), 0].__getitem__
        num_accepted = len(verify(Draft((1,), "lookup"), choose, takes_all(emitted)))
        accepted += num_accepted
        counts[emitted[0]] += 1
        if not num_accepted:
            after_rejection[emitted[0]] += 1
    assert [count / num_draws for count in counts] == pytest.approx(p.tolist(), abs=tolerance)
    assert accepted / num_draws == pytest.approx(0.3, abs=tolerance)
    rejected = num_draws - accepted
    assert [count / rejected for count in after_rejection] == pytest.approx(
        [5 / 7, 0, 2 / 7], abs=tolerance
    )


@pytest.mark.parametrize("offered", [0, 1, 2])
def test_o04_drafts_keep_the_sampled_tokens_themselves(offered):
    """Stronger than the same distribution: with one seed, the same draws."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    outputs = []
    for mode in (DraftMode.AUTO, DraftMode.OFF):
        model = ToyModel(lambda _: logits, vocab_size=3)
        with toy_engine(model, letters(3), draft=lambda _, n: [offered] * n) as engine:
            sampling = SamplingParams(temperature=1.0, seed=7)
            finished = engine.complete(ask("a", max_tokens=200, sampling=sampling, draft=mode))
        outputs.append(finished.token_ids)
    assert outputs[0] == outputs[1]
    assert set(outputs[0]) == {0, 1, 2}


def test_o04_temperature_zero_takes_the_first():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    model = ToyModel(lambda _: logits, vocab_size=3)
    with toy_engine(model, letters(3), draft=lambda _, n: [1] * n) as engine:
        assert engine.complete(ask("a", max_tokens=50)).token_ids == (0,) * 50


O05_OUTPUT = (9, 2, 4, 8, 6, 2, 3, 9, 6, 9, 6, 5, 2, 9, 1, 4, 5, 9, 9, 10, 7, 1, 0, 5)


def run_o05(model, **options):
    """Every draft is right three times, given the state that the model is in, then wrong."""

    def draft(history, budget):
        state, tokens = model.states[0], [history[-1]]
        for _ in range(4):
            state = (31 * state + tokens[-1]) % 65536
            tokens.append(state % 11)
        return [*tokens[1:4], (tokens[4] + 1) % 11][:budget]

    with toy_engine(model, letters(11), draft=draft, draft_tokens=4) as engine:
        return engine.complete(ask("b", max_tokens=24, **options)).token_ids


def test_o05_recurrent_state_after_partial_acceptance():
    drafted, plain = ToyRecurrentModel(vocab_size=11), ToyRecurrentModel(vocab_size=11)
    assert run_o05(drafted) == O05_OUTPUT
    assert run_o05(plain, draft=DraftMode.OFF) == O05_OUTPUT
    assert len(drafted.committed_states) == 6
    assert set(drafted.committed_states) <= set(plain.committed_states)


def test_o05_without_rollback_goes_wrong():
    """The toy can tell: committing every row gives the known wrong output."""
    wrong = run_o05(ToyRecurrentModel(vocab_size=11, commits_all=True))
    assert wrong[:8] == (9, 2, 4, 8, 2, 3, 9, 3)


@pytest.mark.parametrize("mode", [DraftMode.AUTO, DraftMode.OFF])
def test_o06_penalties_count_exactly_the_emitted_tokens(mode):
    expected = [*"abacbacbacba"]
    logits = torch.tensor([1.00, 0.93, 0.81])
    model = ToyModel(lambda _: logits, vocab_size=3)

    def perfect(history, budget):
        return ["abc".index(letter) for letter in expected[len(history) - 1 :]][:budget]

    with toy_engine(model, letters(3), draft=perfect, draft_tokens=2) as engine:
        sampling = SamplingParams(frequency_penalty=0.15)
        finished = engine.complete(ask("a", max_tokens=12, sampling=sampling, draft=mode))
    assert finished.text == "".join(expected)
    if mode is DraftMode.AUTO:
        assert engine.runner.num_forwards == 4


def test_stop_token_inside_a_draft_ends_the_output():
    tokenizer = byte_tokenizer()
    end = min(tokenizer.stop_ids)
    answer = [*b"yes", end, *b"never shown"]

    def following(history):
        return answer[(len(history) - 1) % len(answer)]

    with toy_engine(
        greedy_model(following, tokenizer.vocab_size), tokenizer, draft=chain(following)
    ) as engine:
        finished = engine.complete(ask("?"))
    assert (finished.text, finished.reason) == ("yes", FinishReason.STOP)
    assert finished.token_ids == (*b"yes", end)
