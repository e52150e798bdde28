"""A world without a network: what follows a token, and what drafters believe of it, are tables.

The drafters are the engine's own. Those that read rows of a model get a block, and a pass over a
block of masks, that look their guesses up.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count

import numpy as np
import torch

from ragflash.engine.request import SamplingParams
from ragflash.engine.sampler import draw, probabilities, uniform
from ragflash.models.dflash import Candidates
from ragflash.speculative.costs import StepCosts
from ragflash.speculative.dflash import DFlashDrafter
from ragflash.speculative.drafter import Drafter
from ragflash.speculative.grafted import TreeDrafter
from ragflash.speculative.lookup import LookupDrafter, SourceIndex
from ragflash.speculative.mtp import MtpDrafter
from ragflash.speculative.policy import AdaptiveDrafter, Source
from ragflash.speculative.rows import RowDrafter
from ragflash.speculative.survival import DraftKind, Survival
from tests.engine.toys import StubDrafter
from tests.engine.trees import wild_tree

VOCAB = 5
BUDGET = 12
SAMPLING = SamplingParams(temperature=0.8, top_k=4, logit_bias=((2, 0.4),))
LOGITS = 1.3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
GUESSED = LOGITS + 0.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
LIKELIEST = GUESSED.argmax(dim=-1).tolist()
TARGET = [probabilities(row, SAMPLING, prompt_ids=np.empty(0), output=()) for row in LOGITS]


@cache
def drawn(seed: int, position: int, last: int) -> int:
    """The engine's draw of the token after `last`."""
    return draw(TARGET[last], uniform(seed, position))


def text(tokens: Sequence[int], num_tokens: int, seed: int) -> list[int]:
    """Go on plainly up to so many tokens."""
    written = [*tokens]
    while len(written) < num_tokens:
        written.append(drawn(seed, len(written), written[-1]))
    return written


def document(num_tokens: int) -> list[int]:
    """A text that prefers what drafters guess."""
    likely, tokens = (2 * GUESSED).softmax(dim=-1), [0]
    for position in range(1, num_tokens):
        tokens.append(draw(likely[tokens[-1]], uniform(5, position)))
    return tokens


INDEX = SourceIndex.build(document(300))


@dataclass(frozen=True)
class Drafting:
    """A sequence's drafter, and those of its parts that are told rows."""

    drafter: Drafter
    told: tuple[RowDrafter, ...] = ()


class TableContext:
    """In the place of `DraftContext`: a slot's distribution follows from the one before it."""

    most_tokens = 7
    position = 0

    def truncate(self, position: int) -> None:
        self.position = position

    def append(self, features: torch.Tensor) -> None:
        self.position += len(features)

    def draft(self, pending: int, position: int, width: int, top_k: int) -> Candidates:
        assert position == self.position
        best, token_ids = SLOTS[pending]
        chain = tuple(token_ids[:width, 0].tolist())
        return Candidates(token_ids[:width, :top_k], best[:width, :top_k].log(), chain)


def _slots(pending: int) -> tuple[torch.Tensor, torch.Tensor]:
    likely, slots = GUESSED.softmax(dim=-1), []
    for _ in range(7):
        slots.append(slots[-1] @ likely if slots else likely[pending])
    best, token_ids = torch.stack(slots).sort(dim=-1, descending=True)
    return best, token_ids


SLOTS = [_slots(pending) for pending in range(VOCAB)]


def lookup(prompt: Sequence[int], *, has_branches: bool) -> LookupDrafter:
    return LookupDrafter((INDEX,), prompt, has_branches=has_branches)


class TableBlock:
    """In the place of `MtpRunner`."""

    nothing = torch.zeros(1, VOCAB)

    def absorb(self, before: torch.Tensor, token_ids: Sequence[int], rows: int) -> None:
        assert len(before) == len(token_ids) == rows

    def draft(self, carried: torch.Tensor, newest: int, rows: int) -> list[int]:
        return likeliest([newest], rows)


def mtp() -> MtpDrafter:
    return MtpDrafter(TableBlock(), lambda position, num_rows: num_rows)


def dflash() -> DFlashDrafter:
    return DFlashDrafter(TableContext())


def likeliest(history: Sequence[int], num_tokens: int) -> list[int]:
    tokens = [history[-1]]
    for _ in range(num_tokens):
        tokens.append(LIKELIEST[tokens[-1]])
    return tokens[1:]


def asked(drafter: RowDrafter) -> Source:
    """A drafter that costs time, as the engine offers it."""
    return Source(
        drafter,
        lambda: DraftKind(drafter.source),
        is_free=False,
        most_tokens=drafter.most_tokens,
        is_ready=lambda num_tokens: drafter.position == num_tokens - 1,
    )


def mixed(prompt: Sequence[int]) -> Drafting:
    """All of them, under a policy whose steps take any time, so that it changes its mind often."""
    found, told = lookup(prompt, has_branches=True), (mtp(), dflash())
    rng = random.Random(len(prompt))
    ticks = (at + 0.9 * rng.random() for at in count())
    costs = StepCosts({0: {rows: 10.0 + 0.2 * rows for rows in (1, 2, 4, 8, 16)}})
    free = Source(found, lambda: DraftKind(found.match.source if found.match else "lookup"))
    adaptive = AdaptiveDrafter(
        [free, *map(asked, told)], costs, Survival({}), clock=lambda: next(ticks) / 100
    )
    return Drafting(adaptive, told)


def grafted(prompt: Sequence[int]) -> Drafting:
    block = dflash()
    return Drafting(TreeDrafter(block, lookup(prompt, has_branches=True)), (block,))


def alone(drafter: RowDrafter) -> Drafting:
    return Drafting(drafter, (drafter,))


SOURCES: dict[str, Callable[[Sequence[int]], Drafting]] = {
    "chain": lambda _: Drafting(StubDrafter(likeliest)),
    "tree": lambda _: Drafting(
        StubDrafter(wild_tree(lambda history: likeliest(history, BUDGET), VOCAB))
    ),
    "lookup": lambda prompt: Drafting(lookup(prompt, has_branches=False)),
    "lookup tree": lambda prompt: Drafting(lookup(prompt, has_branches=True)),
    "mtp": lambda _: alone(mtp()),
    "dflash": lambda _: alone(dflash()),
    "dflash tree": grafted,
    "mixed": mixed,
}
