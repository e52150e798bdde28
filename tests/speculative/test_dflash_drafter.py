"""A DFlash drafter in the loop of propose, verify and observe."""

from collections.abc import Sequence

import pytest

from ragflash.models.dflash import DFlashModel, DraftSequence
from ragflash.speculative.dflash import DFlashDrafter
from ragflash.speculative.drafter import Draft
from ragflash.speculative.verify import verify
from tests.models.dflash.drafters import (
    BLOCK,
    load_toy,
    make_toy,
    run_target,
    small_target,
    target_of,
)

VOCAB, PROMPT, NUM_TOKENS = 6, (3, 1, 4, 1, 5, 2, 0), 24


@pytest.fixture(scope="module")
def target():
    return small_target(VOCAB)


@pytest.fixture(scope="module", params=[False, True], ids=["first", "second"])
def model(request, target, tmp_path_factory) -> DFlashModel:
    toy = make_toy(second=request.param, vocab_size=VOCAB)
    folder = tmp_path_factory.mktemp("drafter") / "toy"
    return load_toy(toy, folder, target=target_of(target))


def absorb(target, drafter: DFlashDrafter, tokens: Sequence[int], start: int = 0) -> None:
    """What the engine does after each commit, of all tokens at once."""
    drafter.absorb(start, tokens[start:], run_target(target, tokens)[0][start:])


def extend(target, tokens: list[int], draft: Draft) -> list[int]:
    """Append what a forward verifies of a draft, and return which of it that is."""
    choices = run_target(target, [*tokens, *draft.token_ids])[1][len(tokens) - 1 :]

    def emit(token: int) -> bool:
        tokens.append(token)
        return True

    return verify(draft, choices.__getitem__, emit)


def test_an_answer_with_drafts_is_the_answer_without(model, target):
    drafter, drafts = DFlashDrafter(DraftSequence(model, 64)), []
    tokens, computed = [*PROMPT, run_target(target, PROMPT)[1][-1]], 0
    while len(tokens) < len(PROMPT) + NUM_TOKENS:
        absorb(target, drafter, tokens[:-1], computed)
        computed = len(tokens) - 1
        draft = drafter.propose(tokens, 4)
        drafter.observe(draft, extend(target, tokens, draft))
        drafts.append(draft)
    assert tokens[len(PROMPT) :] == run_target(target, tokens)[1][len(PROMPT) - 1 : -1]
    assert all(len(draft) == 4 and draft.source == "dflash" for draft in drafts)
    assert len(drafts) < len(tokens) - len(PROMPT)


def test_proposes_no_more_than_it_was_trained_for(model, target):
    drafter = DFlashDrafter(DraftSequence(model, 64))
    absorb(target, drafter, PROMPT[:-1])
    assert len(drafter.propose(PROMPT, 1)) == 1
    assert len(drafter.propose(PROMPT, 50)) == drafter.most_tokens == BLOCK - 1
    narrow = DFlashDrafter(DraftSequence(model, 64), num_tokens=2)
    absorb(target, narrow, PROMPT[:-1])
    assert len(narrow.propose(PROMPT, 50)) == 2


def test_waits_for_tokens_that_are_not_computed(model, target):
    drafter = DFlashDrafter(DraftSequence(model, 64))
    absorb(target, drafter, PROMPT[:4])
    assert drafter.propose(PROMPT, 4) == Draft((), "dflash", reason="no_context")
    absorb(target, drafter, PROMPT[:-1], start=4)
    assert len(drafter.propose(PROMPT, 4)) == 4


def test_a_stored_session_proposes_what_it_would_have(model, target):
    drafter, restored = (
        DFlashDrafter(DraftSequence(model, 64)),
        DFlashDrafter(DraftSequence(model, 64)),
    )
    absorb(target, drafter, PROMPT[:5])
    restored.load_state(drafter.export_state())
    for one in (drafter, restored):
        absorb(target, one, PROMPT[:-1], start=5)
    found = restored.candidates(PROMPT, 4)
    assert found is not None
    assert drafter.propose(PROMPT, 4) == Draft(found.chain, "dflash")


def test_rows_may_begin_late_or_again(model, target):
    """A prompt from the cache without the drafter's state, and tokens that are computed anew."""
    late, drafter = DFlashDrafter(DraftSequence(model, 64)), DFlashDrafter(DraftSequence(model, 64))
    absorb(target, late, PROMPT[:-1], start=4)
    assert len(late.propose(PROMPT, 4)) == 4
    absorb(target, drafter, PROMPT[:-1])
    expected = drafter.propose(PROMPT, 4)
    absorb(target, drafter, PROMPT[:-1], start=3)
    assert drafter.propose(PROMPT, 4) == expected


def test_refuses_the_state_of_another(model):
    with pytest.raises(ValueError, match="another drafter's"):
        DFlashDrafter(DraftSequence(model, 64)).load_state(b"")
