"""A DFlash drafter in the loop of propose, verify and observe."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from ragflash.models.dflash import DFlashModel
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


class Features:
    """What the engine does: features of committed tokens, from where they were left."""

    def __init__(self, target: torch.nn.Module, start: int = 0) -> None:
        self._target, self._taken, self._committed = target, start, ()

    def commit(self, token_ids: Sequence[int]) -> None:
        self._committed = tuple(token_ids)

    def take(self) -> Iterator[tuple[int, torch.Tensor]]:
        if len(self._committed) > self._taken:
            first, self._taken = self._taken, len(self._committed)
            yield first, run_target(self._target, self._committed)[0][first:]


def extend(target, tokens: list[int], draft: Draft) -> list[int]:
    """Append what a forward verifies of a draft, and return which of it that is."""
    choices = run_target(target, [*tokens, *draft.token_ids])[1][len(tokens) - 1 :]

    def emit(token: int) -> bool:
        tokens.append(token)
        return True

    return verify(draft, choices.__getitem__, emit)


def answer(target, drafter: DFlashDrafter, features: Features) -> tuple[list[int], list[Draft]]:
    """Decode greedily with drafts."""
    tokens = [*PROMPT, run_target(target, PROMPT)[1][-1]]
    drafts = []
    while len(tokens) < len(PROMPT) + NUM_TOKENS:
        features.commit(tokens[:-1])
        draft = drafter.propose(tokens, 4)
        drafter.observe(draft, extend(target, tokens, draft))
        drafts.append(draft)
    return tokens, drafts


def test_an_answer_with_drafts_is_the_answer_without(model, target):
    features = Features(target)
    tokens, drafts = answer(target, DFlashDrafter(model, features, 64), features)
    expected = list(PROMPT)
    while len(expected) < len(tokens):
        expected.append(run_target(target, expected)[1][-1])
    assert tokens == expected
    assert all(len(draft) == 4 and draft.source == "dflash" for draft in drafts)
    assert len(drafts) < len(tokens) - len(PROMPT)


def test_proposes_no_more_than_it_was_trained_for(model, target):
    features = Features(target)
    drafter = DFlashDrafter(model, features, 64)
    features.commit(PROMPT[:-1])
    assert len(drafter.propose(PROMPT, 1)) == 1
    assert len(drafter.propose(PROMPT, 50)) == BLOCK - 1


def test_waits_for_tokens_that_are_not_computed(model, target):
    features = Features(target)
    drafter = DFlashDrafter(model, features, 64)
    features.commit(PROMPT[:4])
    assert drafter.propose(PROMPT, 4) == Draft((), "dflash")
    features.commit(PROMPT[:-1])
    assert len(drafter.propose(PROMPT, 4)) == 4


def test_a_stored_session_proposes_what_it_would_have(model, target):
    features = Features(target)
    drafter = DFlashDrafter(model, features, 64)
    features.commit(PROMPT[:5])
    drafter.propose(PROMPT[:6], 4)
    restored = DFlashDrafter(model, later := Features(target, start=5), 64)
    restored.load_state(drafter.export_state())
    for source in (features, later):
        source.commit(PROMPT[:-1])
    assert restored.candidates(PROMPT, 4) is not None
    assert restored.propose(PROMPT, 4) == drafter.propose(PROMPT, 4)


def test_features_may_begin_late_or_again(model, target):
    """A prompt from the cache without the drafter's state, and rows that are computed anew."""
    features = Features(target, start=4)
    drafter = DFlashDrafter(model, features, 64)
    features.commit(PROMPT[:-1])
    late = drafter.propose(PROMPT, 4)
    assert len(late) == 4
    drafter = DFlashDrafter(model, whole := Features(target), 64)
    whole.commit(PROMPT[:-1])
    expected = drafter.propose(PROMPT, 4)
    whole._taken = 3
    assert drafter.propose(PROMPT, 4) == expected


def test_refuses_the_state_of_another(model, target):
    with pytest.raises(ValueError, match="another drafter's"):
        DFlashDrafter(model, Features(target), 64).load_state(b"")
