"""Sampled text has the same distribution, and is the same, whoever drafts it.

Chi-square over what follows each token, against probabilities that are computed here once more.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import pytest
import torch

from ragflash.speculative.drafter import Draft
from ragflash.speculative.verify import verify
from tests.speculative.tables import BUDGET, LOGITS, SAMPLING, SOURCES, VOCAB, drawn, text

Choose = Callable[[int], int]
Emit = Callable[[int], bool]
Verifier = Callable[[Draft, Choose, Emit], Sequence[int]]

TEXT_TOKENS = 250
CRITICAL = 37.70  # chi-square at p = 0.001 with 15 degrees of freedom: 5 tokens, 4 after each


def prompt_of(seed: int) -> list[int]:
    return text([0], 20, seed=10**6 + seed)


class Run:
    """Texts written with drafts: what followed what, and what was drafted."""

    def __init__(self, name: str, num_tokens: int, verifier: Verifier = verify) -> None:
        self.followed = np.zeros((VOCAB, VOCAB), dtype=np.int64)
        self.texts: list[list[int]] = []
        self.drafted, self.accepted = Counter[str](), Counter[str]()
        self._name = name
        self._verifier = verifier
        while self.followed.sum() < num_tokens:
            seed = len(self.texts)
            self.texts.append(self._write(prompt_of(seed), seed))

    def _write(self, prompt: Sequence[int], seed: int) -> list[int]:
        drafting, history = SOURCES[self._name](prompt), [*prompt]
        num_told, num_drawn = 0, len(history)
        end = len(prompt) + TEXT_TOKENS

        def choose(row: int) -> int:
            nonlocal num_drawn
            num_drawn += 1
            return drawn(seed, num_drawn - 1, draft.token_ids[row - 1] if row else pending)

        def emit(token: int) -> bool:
            self.followed[history[-1], token] += 1
            history.append(token)
            return len(history) < end

        while len(history) < end:
            for drafter in drafting.told:
                known = history[num_told:-1]
                drafter.absorb(num_told, known, torch.zeros(len(known), VOCAB))
            num_told, pending = len(history) - 1, history[-1]
            budget = min(BUDGET, end - len(history) - 1)
            draft = Draft((), "none")
            if budget:
                draft = drafting.drafter.propose(history, budget).first(budget)
            accepted = self._verifier(draft, choose, emit)
            if budget:
                drafting.drafter.observe(draft, accepted)
            self.drafted.update(map(draft.source_of, range(len(draft))))
            self.accepted.update(map(draft.source_of, accepted))
        return history

    def chi_square(self) -> float:
        """Of all pairs, given the first of each; infinite if what cannot follow did."""
        expected = probabilities() * self.followed.sum(axis=1, keepdims=True)
        possible = expected > 0
        assert possible.sum() == 4 * VOCAB
        if self.followed[~possible].any():
            return inf
        return float((((self.followed - expected) ** 2)[possible] / expected[possible]).sum())


def probabilities() -> np.ndarray:
    """What follows each token, `[V, V]`: bias, temperature, the four likeliest."""
    logits = LOGITS.double().numpy()
    for token, bias in SAMPLING.logit_bias:
        logits[:, token] += bias
    weights = np.exp(logits / SAMPLING.temperature)
    weights[weights < np.sort(weights, axis=1)[:, -4, None]] = 0.0
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("num_tokens", [2_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_sampled_text_keeps_its_distribution(name, num_tokens):
    run = Run(name, num_tokens)
    assert run.chi_square() < CRITICAL
    drafted, accepted = run.drafted.total(), run.accepted.total()
    assert num_tokens / 5 < accepted < drafted
    if name == "mixed":
        assert {*run.accepted} == {"lookup", "lookup_output", "mtp", "dflash"}
    for seed, written in enumerate(run.texts):
        assert written == text(prompt_of(seed), len(written), seed)


def draw_again(draft: Draft, choose: Choose, emit: Emit) -> Sequence[int]:
    """Wrong: what is drawn after a rejection may be what was rejected."""
    children = draft.children()

    def choose_twice(row: int) -> int:
        token = choose(row)
        return token if (row - 1, token) in children else choose(row)

    return verify(draft, choose_twice, emit)


def trust(draft: Draft, choose: Choose, emit: Emit) -> Sequence[int]:
    """Wrong: the drafter alone decides about every other token."""
    likeliest = dict(reversed(draft.children()))

    def choose_drafted(row: int) -> int:
        token = likeliest.get(row - 1, -1)
        return token if 0 <= token < VOCAB and row % 2 else choose(row)

    return verify(draft, choose_drafted, emit)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("verifier", [draw_again, trust])
def test_a_wrong_verifier_shows(name, verifier):
    assert Run(name, 1_000, verifier).chi_square() > CRITICAL
