"""Drafts copy what the history's end was followed by, and go on where a copy left off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash.speculative.lookup import LookupDrafter, Match, SourceIndex

PLAIN = [*range(100, 200)]


def draft_of(sources, history, budget=20, **options):
    drafter = LookupDrafter([SourceIndex.build(text) for text in sources], **options)
    return drafter.propose(history, budget), drafter.match


def paths(draft):
    return {tuple(draft.token_ids[at] for at in draft.path(leaf)) for leaf in draft.leaves()}


@pytest.mark.parametrize(
    ("matching", "drafted"), [(1, 0), (2, 0), (3, 7), (7, 7), (8, 15), (12, 15), (13, 20), (40, 20)]
)
def test_the_width_grows_with_the_match(matching, drafted):
    draft, match = draft_of([PLAIN], [1, 2, *PLAIN[:matching]], 64)
    assert draft.token_ids == tuple(PLAIN[matching : matching + drafted])
    assert draft.is_chain
    assert draft.source == "lookup"
    assert match == (Match("lookup", matching, 1, 1) if drafted else None)


def test_the_budget_is_a_cap():
    draft, _ = draft_of([PLAIN], PLAIN[:20], 5)
    assert draft.token_ids == tuple(PLAIN[20:25])


def test_a_width_that_is_given_holds_whatever_the_match():
    draft, _ = draft_of([PLAIN], PLAIN[:3], 64, num_tokens=30)
    assert draft.token_ids == tuple(PLAIN[3:33])


def test_nothing_follows_the_end_of_a_source():
    assert draft_of([PLAIN], PLAIN[-20:])[0].token_ids == ()
    assert draft_of([PLAIN], PLAIN[-20:-2])[0].token_ids == tuple(PLAIN[-2:])


def test_the_majority_is_the_trunk_and_the_runner_up_a_branch():
    text = [1, 2, 3, 4, 5, 50, *PLAIN, 1, 2, 3, 4, 6, 60, *PLAIN, 1, 2, 3, 4, 6, 60, 61]
    draft, match = draft_of([text], [1, 2, 3], 7)
    assert paths(draft) == {(4, 6, 60, 100, 101), (4, 5, 50)}
    assert draft.parents == (-1, 0, 1, 2, 3, 0, 5)
    assert match == Match("lookup", 3, 3, 2)
    assert draft_of([text], [1, 2, 3], 7, has_branches=False)[0].is_chain


def test_the_longest_match_of_all_sources_wins():
    short, long = [7, 8, 9, 1, 1], [0, 6, 7, 8, 9, 2, 2]
    history = [6, 7, 8, 9]
    assert draft_of([short, long], history, 2)[0].token_ids == (2, 2)
    assert draft_of([long, short], history, 2)[0].token_ids == (2, 2)
    assert draft_of([short, long], [5, 7, 8, 9], 2)[0].token_ids == (1, 1)
    assert draft_of([long, short], [5, 7, 8, 9], 2)[0].token_ids == (2, 2)


def test_the_source_that_is_copied_goes_first():
    first, second = [7, 8, 9, 1, 1], [30, 31, 32, 33, 34, 7, 8, 9, 2, 2]
    drafter = LookupDrafter([SourceIndex.build(first), SourceIndex.build(second)])
    history = [30, 31, 32]
    assert drafter.propose(history, 1).token_ids == (33,)
    history += [33, 60, 7, 8, 9]
    assert drafter.propose(history, 2).token_ids == (2, 2)


def test_of_equal_places_the_one_after_the_copy_goes_on():
    row = [1, 2, 3]
    text = [*row, 10, 20, *PLAIN, *row, 11, 21, *PLAIN[:50], *row, 12, 22]
    drafter = LookupDrafter([SourceIndex.build(text)], has_branches=False)
    assert drafter.propose([*row], 2).token_ids == (10, 20)
    drafter = LookupDrafter([SourceIndex.build(text)], has_branches=False)
    history = [20, 100, 101]
    assert drafter.propose(history, 1).token_ids == (102,)
    history += [102, 0, *row]
    assert drafter.propose(history, 2).token_ids == (11, 21)


def test_a_copy_longer_than_what_is_compared_goes_on_where_it_is():
    licence = [*range(500, 580)]
    text = [1, *licence, 10, 2, *licence, 20, 3, *licence, 10]
    drafter = LookupDrafter([SourceIndex.build(text)])
    history = [90, 2, *licence[:2]]
    drafter.propose(history, 20)
    for token in licence[2:]:
        history.append(token)
        draft = drafter.propose(history, 20)
    assert draft.token_ids[:3] == (20, 3, 500)
    assert drafter.match == Match("lookup", 81, 1, 1)


def test_output_is_copied_and_counted_apart():
    history = [*PLAIN[:9], 1, *PLAIN[:4]]
    draft, match = draft_of([[1, 2, 3]], history, 3)
    assert (draft.source, draft.token_ids) == ("lookup_output", (104, 105, 106))
    assert match == Match("lookup_output", 4, 1, 1)


def test_two_ways_on_in_the_output_are_a_tree():
    history = [1, 2, 3, 40, 41, 1, 2, 3, 50, 51, 1, 2, 3]
    draft, match = draft_of([], history, 4)
    assert paths(draft) == {(50, 51), (40, 41)}
    assert match.num_agreeing == 1


def test_a_document_goes_before_output_that_matches_no_longer():
    history = [9, 1, 2, 3, 50, 51, 8, 1, 2, 3]
    assert draft_of([[1, 2, 3, 60, 61]], history, 2)[0].token_ids == (60, 61)
    assert draft_of([[1, 2, 3, 60, 61]], [*history[1:], 50, 51, 8, 1, 2, 3], 1)[0].token_ids == (
        50,
    )


def test_what_documents_hold_is_not_looked_up_as_output():
    prompt = [*PLAIN[:10], 1]
    drafter = LookupDrafter([], prompt, written_from=10)
    assert drafter.propose([*prompt, *PLAIN[:5]], 4).token_ids == ()
    drafter = LookupDrafter([], prompt)
    assert drafter.propose([*prompt, *PLAIN[:5]], 4).token_ids == tuple(PLAIN[5:9])


tokens = st.integers(0, 3)
sources = st.lists(st.lists(tokens, max_size=120), max_size=3)


def write(data, draft, index_texts):
    """Some output: along a branch of the draft, or from a source, or free."""
    leaf = data.draw(st.sampled_from(draft.leaves())) if draft.token_ids else None
    path = [] if leaf is None else [draft.token_ids[at] for at in draft.path(leaf)]
    taken = path[: data.draw(st.integers(0, len(path)))]
    if index_texts and data.draw(st.booleans()):
        text = data.draw(st.sampled_from(index_texts))
        start = data.draw(st.integers(0, len(text)))
        taken += text[start : start + data.draw(st.integers(0, 100))]
    return [*taken, data.draw(tokens)]


@given(sources, st.lists(tokens, max_size=20), st.data())
def test_proposals_after_a_restore_equal_those_before(texts, prompt, data):
    written_from = data.draw(st.integers(0, len(prompt)))
    indexes = [SourceIndex.build(text) for text in texts]
    drafter = LookupDrafter(indexes, prompt, written_from=written_from)
    history = [*prompt]
    for _ in range(data.draw(st.integers(1, 6))):
        draft = drafter.propose(history, 20)
        assert len(draft) <= 20
        history += write(data, draft, texts)
        restored = LookupDrafter(indexes, history, written_from=written_from)
        restored.load_state(drafter.export_state())
        assert restored.propose(history, 20) == drafter.propose(history, 20)
        assert restored.match == drafter.match
        drafter = restored if data.draw(st.booleans()) else drafter


@given(sources, st.data())
def test_a_drafter_that_saw_every_step_finds_what_a_new_one_finds(texts, data):
    indexes = [SourceIndex.build(text) for text in texts]
    drafter, history = LookupDrafter(indexes), []
    for _ in range(data.draw(st.integers(1, 6))):
        history += write(data, drafter.propose(history, 20), texts)
        drafter.propose(history, 20)
        fresh = LookupDrafter(indexes, history)
        fresh.propose(history, 20)
        is_resumed = drafter.match and not fresh.match
        if not is_resumed and (drafter.match is None or drafter.match.length <= 64):
            assert (drafter.match and drafter.match.length) == (fresh.match and fresh.match.length)


def resumed_by(edit, num_copied=8):
    """Copy so many tokens of a text, then write an edit; return what is proposed behind it."""
    drafter = LookupDrafter([SourceIndex.build(PLAIN)])
    history = PLAIN[:3]
    draft = drafter.propose(history, num_copied - 3)
    assert len(draft) == num_copied - 3
    history = PLAIN[:num_copied]
    for token_id in edit:
        history.append(token_id)
        draft = drafter.propose(history, 20)
    return draft.token_ids, drafter.match


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        ([PLAIN[11]], 12),  # three left out
        ([1, PLAIN[8]], 9),  # one put in
        ([1, PLAIN[9]], 10),  # one replaced
        ([1, 2, 3, PLAIN[8]], 9),  # three put in
    ],
)
def test_a_copy_is_resumed_by_one_token_near_the_place_where_it_broke_off(edit, place):
    drafted, match = resumed_by(edit)
    assert drafted == tuple(PLAIN[place : place + 15])
    assert match == Match("lookup", 8, 1, 1)


@pytest.mark.parametrize(
    ("edit", "num_copied"),
    [
        ([PLAIN[12]], 8),  # too far on in the document
        ([1, 2, 3, 4, PLAIN[8]], 8),  # too long ago
        ([1, 2], 8),  # not in it
        ([1, PLAIN[7]], 7),  # the copy was too short
    ],
)
def test_a_copy_is_not_resumed_otherwise(edit, num_copied):
    assert resumed_by(edit, num_copied) == ((), None)


def test_what_is_resumed_goes_on_as_any_copy():
    drafter = LookupDrafter([SourceIndex.build(PLAIN)])
    drafter.propose(PLAIN[:8], 20)
    history = [*PLAIN[:9], 1]
    drafter.propose(history, 20)
    history.append(PLAIN[10])
    draft = drafter.propose(history, 20)
    restored = LookupDrafter([SourceIndex.build(PLAIN)], history)
    restored.load_state(drafter.export_state())
    assert restored.propose(history, 20) == draft
    history += draft.token_ids
    assert drafter.propose(history, 20).token_ids == tuple(PLAIN[26:46])
    assert drafter.match == Match("lookup", 16, 1, 1)


def test_a_document_that_is_gone_leaves_no_place():
    drafter = LookupDrafter([SourceIndex.build(PLAIN)])
    drafter.propose(PLAIN[:5], 5)
    restored = LookupDrafter([], PLAIN[:5])
    restored.load_state(drafter.export_state())
    assert restored.propose(PLAIN[:6], 5).token_ids == ()


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        (b"", "Expecting value"),
        (b"\xff", "codec"),
        (b"[]", "no state"),
        (b"{}", "no state"),
        (b'{"version": 1}', "version 1"),
        (b'{"version": 2, "num_placed": 0, "place": [[1]], "proposed": []}', "not enough"),
    ],
)
def test_a_state_that_is_none_is_refused(state, fault):
    with pytest.raises(ValueError, match=fault):
        LookupDrafter([]).load_state(state)


def test_places_outside_all_sources_are_refused():
    drafter = LookupDrafter([SourceIndex.build(PLAIN)])
    drafter.propose(PLAIN[:5], 5)
    state = drafter.export_state().replace(b", 5, ", b", -5, ")
    with pytest.raises(ValueError, match="nowhere"):
        drafter.load_state(state)
