"""Trees of drafts never change the output, whatever they hold."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.engine.constraint import Choice, Free, Literal
from ragflash.engine.request import (
    DraftMode,
    SamplingParams,
)
from ragflash.speculative.drafter import Draft
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    ToyModel,
    ToyRecurrentModel,
    ToyTokenizer,
    ask,
    byte_tokenizer,
    chain,
    greedy_model,
    random_logits,
)
from tests.engine.trees import answer_of, wild_tree

LETTERS = ToyTokenizer([letter.encode() for letter in string.ascii_letters[:17]])
VOCAB = LETTERS.vocab_size


def affine(history):
    return (3 * history[-1] + 1) % VOCAB


def telling(finished):
    """All that a reply says of its tokens."""
    return (
        finished.token_ids, finished.text, finished.reason, finished.usage, finished.logprobs,
        finished.num_shown,
    )  # fmt: skip


def run(requests, draft=None, *, tokenizer=LETTERS, logits=None, **options):
    """Answer requests together; return what each reply says, and the steps it took."""
    model = ToyModel(logits or random_logits(tokenizer.vocab_size), vocab_size=tokenizer.vocab_size)
    with toy_engine(model, tokenizer, draft=draft, max_slots=8, **options) as engine:
        replies = engine.complete_all(requests)
        engine.assert_pages_are_accounted_for()
        return [telling(reply) for reply in replies], replies


def assert_trees_change_nothing(requests, *, seed=0, **options):
    """Compare with a plain run; return tokens that were drafted and accepted."""
    plain, replies = run(requests, **options)
    tokenizer = options.get("tokenizer", LETTERS)
    prompts = [tokenizer.encode(request.messages[0].segments[0].text) for request in requests]
    known = [[*prompt, *reply.token_ids] for prompt, reply in zip(prompts, replies, strict=True)]

    def following(history):
        return next(
            (all_[len(history) :] for all_ in known if all_[: len(history)] == [*history]), ()
        )

    draft = wild_tree(following, tokenizer.vocab_size, seed)
    drafted, after = run(requests, draft, **options)
    assert drafted == plain
    return tuple(
        sum(getattr(reply.timings, name) for reply in after)
        for name in ("draft_n", "draft_n_accepted")
    )


@pytest.mark.parametrize("num_rows", [2, 8, 16, 21])
def test_greedy_output_does_not_depend_on_trees(num_rows):
    model = greedy_model(affine, VOCAB)
    right = chain(affine)
    draft = wild_tree(lambda history: right(history, 30), VOCAB)
    with toy_engine(model, LETTERS, draft=draft, draft_tokens=num_rows - 1) as engine:
        finished = engine.complete(ask("b", max_tokens=40))
        assert [*finished.token_ids] == right([1], 40)
        assert max(step[0] for step in model.steps) <= num_rows
        assert engine.runner.num_forwards < 40
        assert finished.timings.draft_n_accepted > 0
        engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_caps_of_every_length(max_tokens):
    asked = [ask("abc", max_tokens=max_tokens, logprobs=True, top_logprobs=2)]
    assert_trees_change_nothing(asked, seed=max_tokens)


def test_the_end_of_the_context():
    right = chain(affine)
    outputs = []
    for mode in (DraftMode.AUTO, DraftMode.OFF):
        model = greedy_model(affine, VOCAB, context_tokens=64)
        draft = wild_tree(lambda history: right(history, 30), VOCAB)
        with toy_engine(model, LETTERS, draft=draft, draft_tokens=20) as engine:
            finished = [
                engine.complete(ask("a" * length, max_tokens=99, draft=mode))
                for length in range(40, 64)
            ]
        outputs.append([*map(telling, finished)])
    assert outputs[0] == outputs[1]


@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from((0.0, 0.0, 0.7, 1.5)),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.integers(1, 5),
            "top_p": st.floats(0.2, 0.9),
            "min_p": st.floats(0.0, 0.3),
            "repetition_penalty": st.floats(0.8, 1.5),
            "presence_penalty": st.floats(-1, 1),
            "frequency_penalty": st.floats(-1, 1),
            "logit_bias": st.just(((3, 1.5), (5, -2.0))),
        },
    ),
    stop=st.lists(st.text("abcdefg", min_size=1, max_size=2), max_size=2),
    max_tokens=st.integers(1, 25),
    looks_back=st.sampled_from((1, 2, 1000)),
    draft_tokens=st.sampled_from((1, 4, 15, 20)),
)
@settings(max_examples=12, deadline=None)
def test_any_histories_and_settings(
    seed, temperature, sampling, stop, max_tokens, looks_back, draft_tokens
):
    """Each example is ten prompts of their own."""
    params = SamplingParams(temperature=temperature, seed=seed % 2**31, **sampling)
    asked = [
        ask(
            string.ascii_letters[at : at + 1 + seed % 7],
            name=f"{at}",
            max_tokens=max_tokens,
            stop=tuple(stop),
            sampling=params,
            logprobs=True,
        )
        for at in range(10)
    ]
    logits = random_logits(VOCAB, looks_back=looks_back)
    assert_trees_change_nothing(asked, seed=seed, logits=logits, draft_tokens=draft_tokens)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_histories():
    drafted, accepted = 0, 0
    for seed in range(1000):
        params = SamplingParams(temperature=(0.0, 0.9)[seed % 2], seed=seed, frequency_penalty=0.3)
        asked = [
            ask(string.ascii_letters[at : at + 1 + seed % 5], name=f"{at}", max_tokens=12,
                sampling=params, stop=("ab",))
            for at in range(10)
        ]  # fmt: skip
        logits = random_logits(VOCAB, looks_back=1 + seed % 3)
        counts = assert_trees_change_nothing(asked, seed=seed, logits=logits)
        drafted, accepted = drafted + counts[0], accepted + counts[1]
    assert accepted > 50_000


@pytest.mark.parametrize("seed", range(5))
def test_constraints_see_the_emitted_tokens(seed):
    tokenizer = byte_tokenizer("yes", "no", "maybe", " then")
    constraint = (Literal("So: "), Choice(("yes", "no", "may not")), Free())
    asked = [ask("?", max_tokens=30, constraint=constraint, logprobs=True)]
    drafted, accepted = assert_trees_change_nothing(
        asked, seed=seed, tokenizer=tokenizer, logits=random_logits(tokenizer.vocab_size)
    )
    assert 0 < accepted < drafted


def test_every_branch_is_cut_where_the_constraint_ends_it():
    tokenizer = byte_tokenizer()
    constraint = (Choice(("yes", "yet", "no")),)
    proposed = Draft((*b"ynxeost", *b"q"), "test", (-1, -1, -1, 0, 1, 3, 3, 6))

    def first_only(history, budget):
        return proposed if len(history) == 1 else []

    model = ToyModel(random_logits(tokenizer.vocab_size), vocab_size=tokenizer.vocab_size)
    with toy_engine(model, tokenizer, draft=first_only) as engine:
        finished = engine.complete(ask("?", constraint=constraint))
        told = engine.drafters[0].told
    assert finished.text in {"yes", "yet", "no"}
    assert bytes(told[0].token_ids) == b"yneost"
    assert told[0].parents == (-1, -1, 0, 1, 2, 2)


def recurrent_output(draft, **options):
    model = ToyRecurrentModel(vocab_size=11)
    tokenizer = ToyTokenizer([letter.encode() for letter in string.ascii_letters[:11]])
    with toy_engine(model, tokenizer, draft=draft and draft(model), draft_tokens=12) as engine:
        finished = engine.complete(ask("b", max_tokens=60, **options))
        return finished, model


@pytest.mark.parametrize("seed", range(20))
def test_recurrent_state_follows_the_accepted_path(seed):
    plain, plain_model = recurrent_output(None)
    following = answer_of(plain.token_ids, 1)
    drafted, model = recurrent_output(lambda _: wild_tree(following, 11, seed))
    assert drafted.token_ids == plain.token_ids
    assert drafted.timings.draft_n_accepted > 10
    assert set(model.committed_states) <= set(plain_model.committed_states)


def test_a_tree_that_is_a_chain_is_computed_as_one():
    right = chain(affine)

    def draft(history, budget):
        return Draft(tuple(right(history, budget)), "test", tuple(range(-1, budget - 1)))

    seen = []
    model = greedy_model(affine, VOCAB)
    forward = model.forward

    def noting(batch, pages):
        seen.extend(rows.parents for rows in batch.sequences)
        return forward(batch, pages)

    model.forward = noting
    with toy_engine(model, LETTERS, draft=draft) as engine:
        assert [*engine.complete(ask("b", max_tokens=30)).token_ids] == right([1], 30)
    assert set(seen) == {None}


def test_the_reply_counts_what_was_drafted_and_accepted():
    right = chain(affine)

    def draft(history, budget):
        a, b = right(history, 2)
        return Draft((16 - a, a, b, 16 - b), "test", (-1, -1, 1, 1)).first(budget)

    with toy_engine(greedy_model(affine, VOCAB), LETTERS, draft=draft, draft_tokens=4) as engine:
        finished = engine.complete(ask("b", max_tokens=6))
        assert engine.drafters[0].observed == [(4, 2), (2, 1)]
    assert (finished.timings.draft_n, finished.timings.draft_n_accepted) == (6, 3)
