"""Chunks of a prompt that are padded to a captured size."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from ragflash.models.contract import SequenceRows
from tests.models.families import VOCAB_SIZE
from tests.models.forwards import PAGES, batch_of
from tests.models.programmes import Pair, assert_near, feed, make_pair

TEXT = random.Random(5).choices(range(VOCAB_SIZE), k=560)
COUNTS = (64, 160, 300)
NAMES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Callable[[str, bool], Pair]:
    def pair(name: str, padded: bool) -> Pair:
        return make_pair(name, tmp_path_factory.mktemp(name), COUNTS if padded else ())

    return cache(pair)


def start_over(pair: Pair) -> None:
    """Poison all pages."""
    for page in PAGES:
        pair.pages.exact.page(page).fill_(float("nan"))


def written(pair: Pair, num_tokens: int) -> torch.Tensor:
    """Keys and values of the first tokens of all layers; of the places after them none is told."""
    exact = pair.pages.exact
    layers = range(len(exact.layout.layers))
    both = [exact.keys(at) for at in layers] + [exact.values(at) for at in layers]
    tokens = [x[list(PAGES)].transpose(0, 1).flatten(1, 2)[:, :num_tokens] for x in both]
    return torch.cat([part.flatten() for part in tokens])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [[33], [64, 65], [100, 160, 161], [300], [20, 37, 1, 299]])
def test_padded_chunks_give_what_unpadded_ones_give(pairs, name, chunks):
    plain, padded = pairs(name, False), pairs(name, True)
    text = TEXT[: sum(chunks) + 40]
    for pair in (plain, padded):
        start_over(pair)
    expected, found = feed(plain, text, chunks), feed(padded, text, chunks)
    assert_near(found, expected, 1e-3)
    kept, stored = written(plain, len(text)).float(), written(padded, len(text)).float()
    torch.testing.assert_close(stored, kept, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_how_much_padding_follows(pairs, name):
    """Nor on what the chunk before left in the tables."""
    pair = pairs(name, True)
    start_over(pair)
    expected = feed(pair, TEXT[:40], [])
    feed(pair, TEXT[100:164], [])
    start_over(pair)
    assert torch.equal(feed(pair, TEXT[:40], []), expected)


@pytest.mark.parametrize("name", NAMES)
def test_padding_writes_nothing(pairs, name):
    pair = pairs(name, True)
    feed(pair, TEXT[:300], [])  # tables full of pages
    start_over(pair)
    feed(pair, TEXT[:41], [])
    exact = pair.pages.exact
    others = [page for page in PAGES if page != PAGES[0]]
    for layer in range(len(exact.layout.layers)):
        for pages in (exact.keys(layer), exact.values(layer)):
            assert pages[PAGES[0], :, :41].isfinite().all()
            assert pages[PAGES[0], :, 41:].isnan().all()
            assert pages[others].isnan().all()


def test_number_and_place_of_rows_decide(pairs):
    chunks = pairs("llama", True).programme._chunks
    rows = SequenceRows(0, 300, 0, PAGES, ())
    assert chunks.take(rows)
    assert chunks.take(replace(rows, committed=700))
    assert not chunks.take(replace(rows, num_rows=301))
    assert not chunks.take(replace(rows, packed_pages=(1,)))
    assert not pairs("llama", False).programme._chunks.take(replace(rows, num_rows=33))


def test_the_next_step_is_begun_behind_a_chunk(pairs):
    pair = pairs("llama", True)
    feed(pair, TEXT[:50], [])
    programme, pages = pair.programme, pair.pages
    batch = batch_of(TEXT[50:90], 50)
    last = replace(batch.sequences[0], logit_rows=(39,), pages=PAGES[:1])
    batch = replace(batch, sequences=(last,))
    token = programme.forward_greedy(batch, pages, goes_on=True)
    programme.commit(0, range(40))
    step = batch_of(token, 90)
    step = replace(step, sequences=(replace(step.sequences[0], pages=PAGES[:1]),))
    begun = programme._ahead
    assert begun is not None
    assert (begun.token_ids, begun.sequences) == (token, step.sequences)
    ahead = programme.forward_greedy(step, pages)
    assert ahead == programme.forward(step, pages).argmax(-1).tolist()
