"""Rows that a card keeps for drafters are those of the layers, however they were computed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from ragflash.models.contract import ForwardBatch, GreedyTappedModel, SequenceRows, TappedModel
from tests.models.families import VOCAB_SIZE
from tests.models.forwards import Tree, batch_of, poisoned_pages
from tests.models.programmes import Pair, assert_near, make_pair
from tests.slow import slow

TEXT = random.Random(5).choices(range(VOCAB_SIZE), k=300)
LAYERS = (0, 2)
PADDED = (64, 300)
NAMES = [*slow("llama", "qwen2", "qwen3"), "gemma3", "qwen35"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Callable[[str], Pair]:
    return cache(lambda name: make_pair(name, tmp_path_factory.mktemp(name), PADDED, LAYERS))


def expected_rows(pair: Pair, batch: ForwardBatch) -> torch.Tensor:
    """Taps and stream of the layers, side by side."""
    model = pair.layers
    assert isinstance(model, TappedModel)
    model.reset(0)
    found = model.forward_tapped(batch, poisoned_pages(model), LAYERS)
    return torch.cat((found.taps, found.stream), dim=-1)


def kept_rows(pair: Pair, batch: ForwardBatch) -> torch.Tensor:
    found = pair.programme.forward_tapped(batch, pair.pages, LAYERS)
    return torch.cat((found.taps, found.stream), dim=-1)


def fed(pair: Pair, text: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    pair.programme.reset(0)
    rows, start = [], 0
    for size in chunks:
        rows.append(kept_rows(pair, batch_of(text[start : start + size], start)).clone())
        pair.programme.commit(0, range(size))
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("chunks", "share"), [((300,), 0.02), ((40, 20, 1, 32, 7), 0.06)])
def test_rows_are_those_of_the_layers(pairs, name, chunks, share):
    pair, text = pairs(name), TEXT[: sum(chunks)]
    expected = expected_rows(pair, batch_of(text, 0))
    found = fed(pair, text, chunks)
    for kept, layers in zip(found.chunk(3, dim=-1), expected.chunk(3, dim=-1), strict=True):
        assert_near(kept[1:], layers[1:], share)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_tree_are_those_of_its_paths(pairs, name):
    pair = pairs(name)
    tree = Tree.random(1, VOCAB_SIZE, num_certain=2, num_draft=20)
    fed(pair, TEXT[:40], [40])
    batch = batch_of(tree.token_ids, 40, num_draft=tree.num_draft, parents=tree.parents)
    found = kept_rows(pair, batch)
    for leaf in tree.leaves()[:3]:
        path = tree.path(leaf)
        text = TEXT[:40] + tree.text(path)
        assert_near(found[path], expected_rows(pair, batch_of(text, 0))[40:], 0.06)


@pytest.mark.parametrize("name", [*slow("llama"), "qwen35"])
def test_rows_of_several_sequences_stand_in_their_order(pairs, name):
    """A chunk of many rows between steps of few, so that three groups are launched."""
    pair = pairs(name)
    whole, few = fed(pair, TEXT[:100], [100]), fed(pair, TEXT[:20], [20])
    pair.programme.reset(0)
    pair.programme.reset(1)
    pair.programme.reset(2)
    sequences = (
        SequenceRows(1, 20, 0, (2,), ()),
        SequenceRows(0, 100, 0, (1,), (99,)),
        SequenceRows(2, 20, 0, (3,), (3, 4)),
    )
    ids = torch.tensor([*TEXT[:20], *TEXT[:100], *TEXT[:20]])
    positions = torch.tensor([*range(20), *range(100), *range(20)])
    found = kept_rows(pair, ForwardBatch(ids, positions, sequences))
    assert_near(found, torch.cat((few, whole, few)), 1e-3)


@pytest.mark.parametrize("name", [*slow("llama"), "qwen35"])
def test_rows_outlive_the_step_that_is_begun_behind_them(pairs, name):
    pair = pairs(name)
    assert isinstance(pair.programme, GreedyTappedModel)

    def step(token: int, committed: int, goes_on: bool) -> tuple[list[int], torch.Tensor]:
        batch = batch_of([token], committed)
        page = replace(batch.sequences[0], pages=(3,))
        found = pair.programme.forward_greedy_tapped(
            replace(batch, sequences=(page,)), pair.pages, LAYERS, goes_on=goes_on
        )
        rows = torch.cat((found.taps, found.stream), dim=-1)
        pair.programme.commit(0, range(1))
        return found.tokens, rows

    answers = []
    for goes_on in (False, True):
        fed(pair, TEXT[:40], [40])
        (first,), rows = step(TEXT[40], 40, goes_on)
        assert (pair.programme._ahead is not None) == goes_on
        answers.append([(first, rows.clone()), step(first, 41, goes_on)])
    for (token, rows), (other, others) in zip(*answers, strict=True):
        assert token == other
        assert torch.equal(rows, others)


def test_other_layers_than_those_it_was_made_with_are_refused(pairs, tmp_path):
    batch = batch_of(TEXT[:3], 0)
    pair = pairs("qwen35")
    with pytest.raises(ValueError, match="layers that it was made with"):
        pair.programme.forward_tapped(batch, pair.pages, (1,))
    without = make_pair("qwen35", tmp_path)
    with pytest.raises(ValueError, match="layers that it was made with"):
        without.programme.forward_tapped(batch, without.pages, ())
