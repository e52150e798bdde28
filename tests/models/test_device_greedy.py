"""Tokens that a card chooses itself, and steps that it begins before it is asked."""

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from ragflash.models.contract import ForwardBatch, SequenceRows
from tests.models.families import VOCAB_SIZE
from tests.models.forwards import batch_of
from tests.models.programmes import LOWERED, Pair, feed, make_pair

TEXT = random.Random(4).choices(range(VOCAB_SIZE), k=60)
NAMES = ("llama", "gemma3", "qwen35")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Callable[[str], Pair]:
    return cache(lambda name: make_pair(name, tmp_path_factory.mktemp(name)))


def rows_of(
    token_ids: Sequence[int], committed: int, *, slot: int = 0, page: int = 3
) -> tuple[list[int], SequenceRows]:
    """The rows of a sequence of one page, the logits of the last wanted."""
    num_rows = len(token_ids)
    return [*token_ids], SequenceRows(slot, num_rows, committed, (page,), (num_rows - 1,))


def together(*parts: tuple[list[int], SequenceRows]) -> ForwardBatch:
    token_ids = [token for ids, _ in parts for token in ids]
    positions = [rows.committed + row for _, rows in parts for row in range(rows.num_rows)]
    return ForwardBatch(
        torch.tensor(token_ids), torch.tensor(positions), tuple(rows for _, rows in parts)
    )


def answer(pair: Pair, prompt: Sequence[int], length: int, goes_on: bool | None) -> list[int]:
    """Continue a prompt; without `goes_on` by logits."""
    programme, pages = pair.programme, pair.pages
    programme.reset(0)
    token_ids, rows = [*prompt], [*prompt]
    while len(token_ids) < len(prompt) + length:
        batch = together(rows_of(rows, len(token_ids) - len(rows)))
        if goes_on is None:
            chosen = programme.forward(batch, pages).argmax(-1).tolist()
        else:
            chosen = programme.forward_greedy(batch, pages, goes_on=goes_on)
        programme.commit(0, range(len(rows)))
        token_ids += chosen
        rows = chosen
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("name", LOWERED)
@pytest.mark.parametrize("num_prompt", [7, 50])
def test_tokens_are_those_of_the_logits(pairs, name, num_prompt):
    """Behind few rows and many, and with steps that are begun early."""
    pair, prompt = pairs(name), TEXT[:num_prompt]
    expected = answer(pair, prompt, 12, None)
    assert answer(pair, prompt, 12, goes_on=False) == expected
    assert answer(pair, prompt, 12, goes_on=True) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_was_begun_is_not_computed_again(pairs, name, monkeypatch):
    pair = pairs(name)
    runs: list[int] = []
    replay = pair.programme._replay
    monkeypatch.setattr(
        pair.programme, "_replay", lambda group: (runs.append(len(group)), replay(group))[1]
    )
    answer(pair, TEXT[:7], 10, goes_on=True)
    assert len(runs) == 11  # one of them after the last


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_begun_at_the_end_of_a_page(pairs, name, monkeypatch):
    pair = pairs(name)
    prompt = [*TEXT, *TEXT, *TEXT, *TEXT, *TEXT[:10]]
    expected = answer(pair, prompt, 6, None)
    assert len(prompt) == 250
    groups = []
    run_ahead = pair.programme._run_ahead
    monkeypatch.setattr(
        pair.programme, "_run_ahead",
        lambda *args: (groups.append(args[1]), run_ahead(*args))[1],
    )  # fmt: skip
    assert answer(pair, prompt, 6, goes_on=True) == expected
    assert [group[0].committed for group in groups] == [250, 251, 252, 253, 254, 255]
    last = together(rows_of([1], 255))
    pair.programme.forward_greedy(last, pair.pages, goes_on=True)
    assert len(groups) == 6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("asked", ["another token", "a draft", "logits", "another slot"])
def test_what_was_begun_in_vain_leaves_nothing(pairs, name, asked):
    pair = pairs(name)
    programme, pages = pair.programme, pair.pages

    def begin(goes_on: bool) -> None:
        feed(pair, TEXT[:40], [])
        batch = together(rows_of(TEXT[40:41], 40))
        programme.forward_greedy(batch, pages, goes_on=goes_on)
        programme.commit(0, range(1))

    def go_on() -> torch.Tensor:
        token = TEXT[41]
        if asked == "another slot":
            state = programme.snapshot(0)
            programme.restore(2, state)
            return programme.forward(batch_of(TEXT[41:44], 41, slot=2), pages).clone()
        if asked == "a draft":
            programme.forward(batch_of([token, 5, 6], 41, num_draft=2), pages)
            programme.commit(0, range(1))
        elif asked == "logits":
            programme.forward(batch_of([token], 41), pages)
            programme.commit(0, range(1))
        else:
            programme.forward_greedy(together(rows_of([token], 41)), pages, goes_on=True)
            programme.commit(0, range(1))
        return programme.forward(batch_of(TEXT[42:45], 42), pages).clone()

    begin(goes_on=False)
    expected = go_on()
    begin(goes_on=True)
    assert torch.equal(go_on(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_that_was_given_up_begins_anew(pairs, name):
    """A request that ended between a step and its commit."""
    pair = pairs(name)
    expected = answer(pair, TEXT[:9], 5, None)
    batch = together(rows_of(TEXT[:7], 0))
    pair.programme.forward_greedy(batch, pair.pages, goes_on=True)
    assert answer(pair, TEXT[:9], 5, goes_on=True) == expected


@pytest.mark.parametrize("name", NAMES)
def test_sequences_go_on_together(pairs, name):
    pair = pairs(name)
    programme, pages = pair.programme, pair.pages
    alone = [answer(pair, TEXT[first : first + 7], 4, None) for first in (0, 10)]
    programme.reset(0)
    programme.reset(2)
    ids, length = [TEXT[0:7], TEXT[10:17]], 0
    found: list[list[int]] = [[], []]
    for _ in range(4):
        batch = together(
            rows_of(ids[0], length, slot=0, page=1), rows_of(ids[1], length, slot=2, page=2)
        )
        chosen = programme.forward_greedy(batch, pages, goes_on=True)
        for slot in (0, 2):
            programme.commit(slot, range(len(ids[0])))
        length += len(ids[0])
        ids = [[token] for token in chosen]
        for tokens, token in zip(found, chosen, strict=True):
            tokens.append(token)
    assert found == alone


def test_rows_nobody_asks_about_give_no_tokens(pairs):
    pair = pairs("llama")
    rows = SequenceRows(0, 3, 0, (3,), ())
    batch = ForwardBatch(torch.tensor(TEXT[:3]), torch.arange(3), (rows,))
    assert pair.programme.forward_greedy(batch, pair.pages, goes_on=True) == []
