"""`auto` drafts the tree of a block drafter where it promises most."""

from types import SimpleNamespace

import pytest
import torch

from ragflash.engine.drafting import Drafting
from ragflash.engine.request import DraftMode, GenerateRequest
from ragflash.kvcache.identity import DRAFTER_PART
from ragflash.models.dflash import Candidates
from ragflash.speculative.costs import StepCosts
from ragflash.speculative.drafter import Draft
from ragflash.speculative.lookup import LookupDrafter

FLAT = {1: 10.0, 2: 10.1, 4: 10.2, 8: 10.4, 16: 11.0, 21: 11.2, 32: 12.0}
STEEP = {rows: 5.0 + 3.0 * rows for rows in FLAT}
HISTORY = [5, 6, 7]


class Block:
    """Of four tokens a place the first is not much likelier than the others."""

    source, most_tokens, position = "dflash", 15, len(HISTORY) - 1

    def candidates(self, history, width, top_k=1):
        width = min(width, self.most_tokens)
        token_ids = torch.arange(4).expand(width, 4)
        return Candidates(token_ids, torch.full((width, 4), 0.25).log(), (0,) * width)

    def propose(self, history, budget):
        return Draft(self.candidates(history, budget).chain, self.source)

    def observe(self, draft, accepted):
        pass


def drafter(costs_ms):
    request = GenerateRequest("request", (), draft=DraftMode.AUTO)
    prompt = SimpleNamespace(source_ids=("one",))
    job = SimpleNamespace(request=request, lookup=LookupDrafter(()), prompt=prompt)
    drafting = Drafting([DRAFTER_PART])
    drafting.costs = StepCosts({0: costs_ms})
    return drafting(
        SimpleNamespace(job=job, row_drafters={DRAFTER_PART: Block()}, takes_largest=True)
    )


@pytest.mark.parametrize(("costs_ms", "is_tree"), [(FLAT, True), (STEEP, False)])
def test_a_tree_is_chosen_where_it_pays(costs_ms, is_tree):
    draft = drafter(costs_ms).propose(HISTORY, 20)
    assert draft.is_chain is not is_tree


def test_trees_that_fail_leave_the_place_to_chains():
    auto, kinds = drafter(FLAT), []
    for _ in range(60):
        draft = auto.propose(HISTORY, 20)
        kinds.append(draft.is_chain)
        auto.observe(draft, range(min(len(draft), 12)) if draft.is_chain else ())
    assert not kinds[0]
    assert all(kinds[-20:])
