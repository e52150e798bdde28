"""Trees of a block drafter's places and looked-up branches."""

import math
import random
import string
from types import SimpleNamespace

import pytest
import torch

from ragflash.speculative.drafter import Draft
from ragflash.speculative.grafted import TreeDrafter
from tests.engine.harness import toy_engine
from tests.engine.toys import StubDrafter, ToyTokenizer, ask, chain, greedy_model


class StubBlock:
    """Says what a function does of the next places: tokens and their probabilities."""

    source = "block"

    def __init__(self, say):
        self._say = say

    def candidates(self, history, width, top_k=1):
        places = self._say(history, width)
        if places is None:
            return None
        token_ids = torch.tensor([[token for token, _ in place] for place in places])
        log_probs = torch.tensor([[math.log(p) for _, p in place] for place in places])
        return SimpleNamespace(token_ids=token_ids, log_probs=log_probs)


PLACES = [((1, 0.6), (2, 0.3)), ((3, 0.5), (4, 0.4)), ((5, 0.9), (6, 0.05))]


def paths_of(draft):
    return {tuple(draft.token_ids[at] for at in draft.path(index)) for index in range(len(draft))}


def test_a_copy_shares_what_it_begins_alike_and_branches_off():
    copy = StubDrafter(lambda *_: Draft((1, 4, 7), "lookup"))
    drafter = TreeDrafter(StubBlock(lambda *_: PLACES), copy)
    draft = drafter.propose([0], 8)
    assert len(draft) == 8
    assert {(1,), (1, 4), (1, 4, 7), (1, 3), (1, 3, 5)} <= paths_of(draft)
    sources = {path[-1]: draft.source_of(index) for index, path in enumerate(
        tuple(draft.token_ids[at] for at in draft.path(index)) for index in range(8)
    ) if path in {(1, 4, 7), (1, 3, 5)}}  # fmt: skip
    assert sources == {7: "lookup", 5: "block"}


def test_a_block_drafter_that_cannot_draft_leaves_the_copy():
    copy = StubDrafter(lambda *_: Draft((1, 4, 7), "lookup"))
    drafter = TreeDrafter(StubBlock(lambda *_: None), copy)
    assert drafter.propose([0], 2) == Draft((1, 4), "lookup")


def test_without_a_copy_the_tree_is_the_block_drafters():
    drafter = TreeDrafter(StubBlock(lambda *_: PLACES), StubDrafter(lambda *_: []))
    draft = drafter.propose([0], 4)
    assert (1, 3) in paths_of(draft)
    assert {draft.source_of(index) for index in range(4)} == {"block"}


def test_copies_that_fail_get_no_rows():
    copy = StubDrafter(lambda *_: Draft((9, 9, 9, 9), "lookup"))
    drafter = TreeDrafter(StubBlock(lambda *_: PLACES), copy)
    assert (9, 9) in paths_of(drafter.propose([0], 6))
    for _ in range(30):
        drafter.observe(drafter.propose([0], 6), ())
    assert (9,) not in paths_of(drafter.propose([0], 6))
    assert len(copy.told) == 30


def test_of_two_branches_the_second_has_what_the_first_leaves():
    copy = StubDrafter(lambda *_: Draft((8, 9), "lookup", (-1, -1)))
    drafter = TreeDrafter(StubBlock(lambda *_: [((1, 0.25),)]), copy)
    draft = drafter.propose([0], 2)
    assert paths_of(draft) == {(8,), (1,)}, "0.7, 0.25, 0.3 · 0.7"


@pytest.mark.parametrize("seed", range(4))
def test_trees_change_no_output(seed):
    rng, vocab_size = random.Random(seed), 17
    tokenizer = ToyTokenizer([letter.encode() for letter in string.ascii_letters[:vocab_size]])

    def following(history):
        return (3 * history[-1] + 1) % vocab_size

    right = chain(following)

    def say(history, width):
        """The right token is among the likeliest, mostly first."""
        places = []
        for token in right(history, min(width, 6)):
            others = rng.sample([t for t in range(vocab_size) if t != token], 3)
            others.insert(rng.choice((0, 0, 1, 3)), token)
            places.append([*zip(others, (0.5, 0.25, 0.15, 0.1), strict=True)])
        return places if rng.random() < 0.8 else None

    def copy(history, budget):
        tokens = right(history, budget)
        return [token if rng.random() < 0.8 else 0 for token in tokens]

    draft = TreeDrafter(StubBlock(say), StubDrafter(copy)).propose
    model = greedy_model(following, vocab_size)
    with toy_engine(model, tokenizer, draft=draft, draft_tokens=20) as engine:
        finished = engine.complete(ask("b", max_tokens=60))
        assert [*finished.token_ids] == right([1], 60)
        assert engine.runner.num_forwards < 40
        engine.assert_pages_are_accounted_for()
