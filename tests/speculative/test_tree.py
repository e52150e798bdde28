"""Trees of drafts against all trees there are."""

from itertools import combinations
from math import exp, inf, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.speculative.drafter import Draft
from ragflash.speculative.tree import Graft, Marginals, build_tree

MOST_PLACES, MOST_RANKS = 3, 3


@st.composite
def marginals(draw, least_places=1):
    """Places whose tokens have no more than all probability, the best first."""
    token_ids, log_probs = [], []
    for _ in range(draw(st.integers(least_places, MOST_PLACES))):
        ranks = draw(st.integers(1, MOST_RANKS))
        weights = draw(st.lists(st.floats(0.01, 1), min_size=ranks, max_size=ranks))
        share = draw(st.floats(0.5, 1)) / sum(weights)
        token_ids.append(draw(st.permutations(range(5)))[:ranks])
        log_probs.append(sorted((log(weight * share) for weight in weights), reverse=True))
    return Marginals(token_ids, log_probs, "block")


@st.composite
def grafts(draw):
    """A few random trees whose tokens hold less and less likely."""
    found = []
    for _ in range(draw(st.integers(0, 2))):
        tokens, parents, survival = [], [], []
        for index in range(draw(st.integers(0, 4))):
            parent = draw(st.integers(-1, index - 1))
            before = 1.0 if parent < 0 else survival[parent]
            tokens.append(draw(st.integers(0, 5)))
            parents.append(parent)
            survival.append(before * draw(st.sampled_from((0.3, 0.6, 0.9, 1.0))))
        found.append(Graft(Draft(tuple(tokens), "copy", tuple(parents)), survival))
    return found


def worth_of_paths(places, grafted) -> dict[tuple[int, ...], float]:
    """How likely each text becomes output, by whoever thinks more of it."""
    worth: dict[tuple[int, ...], float] = {}

    def note(path, value):
        worth[path] = max(worth.get(path, 0.0), value)

    def follow(path, value, place):
        if place < len(places.token_ids):
            ranked = zip(places.token_ids[place], places.log_probs[place], strict=True)
            for token, log_prob in ranked:
                note((*path, token), value * exp(log_prob))
                follow((*path, token), value * exp(log_prob), place + 1)

    follow((), 1.0, 0)
    for graft in grafted:
        for index, value in enumerate(graft.survival):
            note(tuple(graft.draft.token_ids[at] for at in graft.draft.path(index)), value)
    return worth


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.token_ids[at] for at in draft.path(index)) for index in range(len(draft))]


def best_worth(worth: dict[tuple[int, ...], float], num_tokens: int) -> float:
    """The most that a tree of so many tokens can be worth, by trying all."""
    best = 0.0
    for chosen in combinations(worth, min(num_tokens, len(worth))):
        have = {(), *chosen}
        if all(path[:-1] in have for path in chosen):
            best = max(best, sum(worth[path] for path in chosen))
    return best


@given(marginals(), grafts(), st.integers(0, 4))
@settings(max_examples=120, deadline=None)
def test_no_tree_of_its_size_is_worth_more(places, grafted, num_tokens):
    draft = build_tree(num_tokens, places, grafted)
    worth = worth_of_paths(places, grafted)
    paths = paths_of(draft)
    assert len({*paths}) == len(draft) == min(num_tokens, len(worth))
    found = sum(worth[path] for path in paths)
    assert found == pytest.approx(best_worth(worth, num_tokens))


@given(marginals(), grafts(), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_every_tree_is_one(places, grafted, num_tokens, num_trunk):
    draft = build_tree(num_tokens, places, grafted, num_trunk=num_trunk)
    worth = worth_of_paths(places, grafted)
    paths = paths_of(draft)
    assert len({*paths}) == len(paths), "nothing is proposed twice"
    assert {*paths} <= {*worth}
    trunk = min(num_trunk, len(places.token_ids), num_tokens)
    assert tuple(tokens[0] for tokens in places.token_ids[:trunk]) in {(), *paths}
    for index in range(1, len(draft)):
        assert draft.parents[index] in draft.path(index - 1) or draft.parents[index] == -1


@given(marginals(), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_expected_accepted_length_is_what_walks_find(places, num_tokens):
    """Over all outputs of independent places, each with its probability."""
    draft = build_tree(num_tokens, places)
    children = draft.children()

    def walk(node, place):
        if place == len(places.token_ids):
            return 0.0
        ranked = zip(places.token_ids[place], places.log_probs[place], strict=True)
        return sum(
            exp(log_prob) * (1 + walk(children[node, token], place + 1))
            for token, log_prob in ranked
            if (node, token) in children
        )

    worth = worth_of_paths(places, ())
    assert walk(-1, 0) == pytest.approx(sum(worth[path] for path in paths_of(draft)))


FLAT = Marginals(((1, 2, 3), (4, 5), (6,)), ((log(0.4), log(0.35), log(0.25)),
                 (log(0.5), log(0.4)), (log(0.9),)), "block")  # fmt: skip


def test_a_trunk_is_deep_where_probabilities_are_flat():
    assert paths_of(build_tree(3, FLAT)) == [(1,), (2,), (3,)]
    assert paths_of(build_tree(3, FLAT, num_trunk=9)) == [(1,), (1, 4), (1, 4, 6)]
    assert paths_of(build_tree(4, FLAT, num_trunk=2)) == [(1,), (1, 4), (2,), (3,)]


def test_a_copy_joins_what_it_begins_alike():
    copy = Graft(Draft((1, 4, 9, 8), "lookup"), (0.9, 0.85, 0.8, 0.75))
    draft = build_tree(6, FLAT, [copy])
    assert paths_of(draft) == [(1,), (1, 4), (1, 4, 9), (1, 4, 9, 8), (2,), (3,)]
    assert draft.source == "block"
    assert draft.sources == ("lookup", "lookup", "lookup", "lookup", "block", "block")


def test_copies_alone_make_a_tree():
    first = Graft(Draft((1, 2), "lookup"), (0.5, 0.4))
    second = Graft(Draft((1, 3, 3), "lookup"), (0.45, 0.42, 0.1))
    draft = build_tree(9, grafts=[first, second])
    assert paths_of(draft) == [(1,), (1, 3), (1, 3, 3), (1, 2)]
    assert (draft.source, draft.sources) == ("lookup", None)


def test_what_cannot_follow_is_left_out():
    never = Marginals(((1, 2),), ((0.0, -inf),), "block")
    dead = Graft(Draft((5, 6), "lookup"), (0.3, 0.0))
    assert paths_of(build_tree(9, never, [dead])) == [(1,), (5,)]
    assert len(build_tree(9)) == 0
