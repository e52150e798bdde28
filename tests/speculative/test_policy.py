"""The policy in a world whose costs and acceptance are known."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.speculative.costs import StepCosts
from ragflash.speculative.drafter import Draft
from ragflash.speculative.policy import AdaptiveDrafter, Idle, Source
from ragflash.speculative.survival import DraftKind, Survival

ROWS = (1, 2, 4, 8, 16, 21, 32)
FLAT = {1: 10.0, 2: 10.3, 4: 10.6, 8: 11.0, 16: 14.0, 21: 17.0, 32: 25.0}
LOOKUP = DraftKind("lookup")
STEEP = {rows: 10.0 * rows for rows in ROWS}


@dataclass
class Always:
    """Proposes `num_tokens` tokens every time."""

    num_tokens: int = 20
    source: str = "lookup"
    draft_ms: float = 0.0
    world: "World | None" = None
    asked: int = 0
    observed: list[int] = field(default_factory=list)

    def propose(self, history, budget):
        self.asked += 1
        if self.world is not None:
            self.world.now_ms += self.draft_ms
        return Draft((7,) * min(self.num_tokens, budget), self.source)

    def observe(self, draft, accepted):
        self.observed.append(len(draft))

    def export_state(self):
        return self.source.encode()

    def load_state(self, state):
        assert state == self.source.encode()


@dataclass
class World:
    """Runs steps: `holds(step, position)` tells whether a drafted token is right.

    With `ahead_ms` a plain step that was expected takes so long, and a draft that was not expected
    waits for one.
    """

    costs_ms: dict[int, float]
    holds: Callable[[int, int], bool]
    ahead_ms: float | None = None
    is_early: bool = True
    now_ms: float = 0.0
    widths: list[int] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    lulls: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    table: StepCosts | None = None

    def source(self, kind=LOOKUP, **options):
        drafter = Always(source=kind.source, world=self, **options)
        return Source(drafter, lambda: kind, is_free=not options.get("draft_ms"))

    def run(self, sources, num_steps, survival=None, believed=None, budget=20):
        share = None if self.ahead_ms is None else self.ahead_ms / self.costs_ms[1]
        self.table = StepCosts({0: believed or self.costs_ms}, share)
        drafter = AdaptiveDrafter(
            sources,
            self.table,
            survival or Survival({}),
            is_early=self.is_early,
            clock=lambda: self.now_ms / 1000,
        )
        history = [1, 2, 3]
        exact = StepCosts({0: self.costs_ms})
        for step in range(num_steps):
            draft = drafter.propose(history, budget)
            is_expected = bool(self.lulls) and self.lulls[-1] and self.ahead_ms is not None
            if is_expected:
                self.now_ms += self.ahead_ms
            if draft or not is_expected:
                self.now_ms += exact.step_ms(1 + len(draft), 0)
            held = 0
            while held < len(draft) and self.holds(step, held):
                held += 1
            drafter.observe(draft, range(held))
            history += [7] * held + [1]
            self.num_tokens += held + 1
            self.widths.append(len(draft))
            self.reasons.append(draft.reason)
            self.lulls.append(draft.goes_on)
        return self

    @property
    def speedup(self):
        plain_ms = self.ahead_ms if self.ahead_ms and self.is_early else self.costs_ms[1]
        return self.num_tokens * plain_ms / self.now_ms


def test_right_drafts_are_as_wide_as_pays():
    world = World(FLAT, lambda step, position: True)
    world.run([world.source()], 200)
    # 16 tokens in 14 ms are more than 8 in 11 and 21 in 17 are more still.
    assert set(world.widths[50:]) == {20}
    assert world.speedup > 0.95 * 21 * 10 / 17


def test_drafts_that_hold_a_little_are_narrow():
    world = World(FLAT, lambda step, position: position < 2)
    world.run([world.source()], 300)
    assert set(world.widths[150:]) == {3}
    assert world.speedup > 2.4


def test_what_is_steep_is_not_drafted():
    chance = random.Random(3)
    world = World(STEEP, lambda step, position: chance.random() < 0.5)
    world.run([world.source()], 2000)
    assert world.speedup > 0.95
    assert world.reasons.count(Idle.NO_GAIN) > 1800


def test_wrong_drafts_lose_next_to_nothing():
    world = World(FLAT, lambda step, position: False)
    world.run([world.source()], 1000)
    assert world.speedup > 0.98
    assert sum(map(bool, world.widths[500:])) < 20


def test_what_begins_to_hold_is_drafted_again():
    world = World(FLAT, lambda step, position: step >= 1000)
    world.run([world.source()], 1600)
    assert set(world.widths[-50:]) == {20}


def test_widths_do_not_flap():
    chance = random.Random(5)
    world = World(FLAT, lambda step, position: chance.random() < 0.8)
    world.run([world.source()], 1000)
    settled = world.widths[200:]
    changes = sum(a != b for a, b in pairwise(settled))
    assert changes < 40
    assert world.speedup > 2.0


def test_costs_believed_wrongly_are_corrected():
    world = World(STEEP, lambda step, position: False)
    world.run([world.source()], 3000, believed=FLAT)
    assert world.speedup > 0.95
    assert world.table.step_ms(8, 0) > 1.3 * FLAT[8]


def test_a_costly_drafter_is_asked_only_while_it_is_worth_it():
    kind = DraftKind("mtp")
    world = World(FLAT, lambda step, position: position < 1)
    poor = world.source(kind, draft_ms=30.0)
    world.run([poor], 1000)
    assert poor.drafter.asked < 40
    assert world.speedup > 0.95
    world = World(FLAT, lambda step, position: position < 3)
    good = world.source(kind, draft_ms=2.0)
    world.run([good], 300)
    assert good.drafter.asked > 250
    assert world.speedup > 2.5


def test_of_two_sources_the_better_one_is_taken_and_both_are_told():
    world = World(FLAT, lambda step, position: position < 15)
    free = world.source(DraftKind("lookup"), num_tokens=2)
    neural = world.source(DraftKind("dflash"), num_tokens=15, draft_ms=3.0)
    world.run([free, neural], 300)
    assert set(world.widths[100:]) == {15}
    assert len(free.drafter.observed) == len(neural.drafter.observed) == 300
    assert set(free.drafter.observed[100:]) == {0}


def test_of_a_tree_only_its_trunk_can_hold():
    """Of twenty tokens ten: as many as of a chain of ten, for the time of twenty."""

    def offer(world, *, has_chain):
        tree = replace(
            world.source(DraftKind("tree"), draft_ms=0.1), depth=lambda num_tokens: num_tokens // 2
        )
        return [tree, world.source(draft_ms=0.1)] if has_chain else [tree]

    alone, both = (World(FLAT, lambda _, position: position < 10) for _ in range(2))
    alone.run(offer(alone, has_chain=False), 200)
    both.run(offer(both, has_chain=True), 200)
    assert alone.widths[-1] == 20
    assert both.widths[-1] == 15, "the rows that were measured"
    assert both.speedup > alone.speedup > 1


def test_nothing_found_is_said():
    world = World(FLAT, lambda step, position: True)
    world.run([world.source(num_tokens=0)], 3)
    assert world.reasons == [Idle.NOTHING_FOUND] * 3


@pytest.mark.parametrize(("ahead_ms", "is_begun"), [(6.0, True), (9.5, False), (None, False)])
def test_a_plain_step_is_begun_early_where_that_saves_more_than_it_risks(ahead_ms, is_begun):
    world = World(FLAT, lambda step, position: True, ahead_ms)
    world.run([world.source(num_tokens=0)], 5)
    assert world.lulls == [is_begun] * 5


def test_the_longer_nothing_is_found_the_less_is_risked():
    world = World(FLAT, lambda step, position: True, 9.5)
    world.run([world.source(num_tokens=0)], 40)
    assert world.lulls == sorted(world.lulls)
    assert world.lulls[-1]


def test_drafts_that_come_and_go_are_not_waited_for_in_vain():
    chance = random.Random(7)
    world = World(FLAT, lambda step, position: True, 6.0)
    found = world.source()

    def comes_and_goes(history, budget):
        return Draft((7,) * (budget if chance.random() < 0.7 else 0), "lookup")

    found.drafter.propose = comes_and_goes
    world.run([found], 400)
    empty = [lull for lull, width in zip(world.lulls, world.widths, strict=True) if not width]
    assert not any(empty[40:])
    assert world.speedup > 4


def test_wrong_drafts_lose_next_to_nothing_beside_steps_that_are_begun_early():
    chance = random.Random(9)
    world = World(FLAT, lambda step, position: False, 6.0)
    found = world.source()
    found.drafter.propose = lambda history, budget: Draft(
        (7,) * (budget if chance.random() < 0.3 else 0), "lookup"
    )
    world.run([found], 1000)
    assert world.speedup > 0.95


def test_a_draft_that_was_not_expected_pays_for_the_step_that_was_begun():
    chance = random.Random(11)
    world = World(FLAT, lambda step, position: position < 1, 6.0)
    found = world.source()
    found.drafter.propose = lambda history, budget: Draft(
        (7,) * (budget if chance.random() < 0.1 else 0), "lookup"
    )
    world.run([found], 1000)
    assert sum(map(bool, world.widths)) < 40, "2 tokens in 16.3 ms, else 12"
    assert world.speedup > 0.97


def test_behind_a_draft_that_held_another_is_awaited():
    world = World(FLAT, lambda step, position: True, 6.0)
    found, proposed = world.source(), iter([20, 0, 0, 0, 0, 0, 0, 0])
    found.drafter.propose = lambda history, budget: Draft((7,) * next(proposed), "lookup")
    world.run([found], 8)
    assert world.lulls[1:3] == [False, False]
    assert world.lulls[-1]


def test_who_needs_logits_is_compared_with_steps_that_are_not_begun_early():
    """As an answer under a constraint, or a sampled one; others share the costs."""
    world = World(FLAT, lambda step, position: position < 1, 5.0, is_early=False)
    world.run([world.source()], 400)
    assert not any(world.lulls)
    assert world.speedup > 1.7, "2 tokens in 10.3 ms, else 20"
    assert world.table.ahead_ms(0) == pytest.approx(5.0)


def test_drafts_must_beat_steps_that_are_begun_early():
    world = World(FLAT, lambda step, position: position < 1, 5.0)
    world.run([world.source()], 1000)
    assert world.reasons.count(Idle.NO_GAIN) > 800, "2 tokens in 10.3 ms are 5.2 ms each"
    assert world.speedup > 0.95


def test_what_was_learned_of_a_document_is_there_for_the_next_question():
    survival = Survival({"lookup": (0.9,)})
    for _ in range(2):
        world = World(FLAT, lambda step, position: False)
        world.run([world.source()], 300, survival=survival)
    assert sum(map(bool, world.widths)) <= 6
    assert world.speedup > 0.98


def test_states_of_all_sources_come_back():
    world = World(FLAT, lambda step, position: True)
    sources = [world.source(DraftKind(name)) for name in ("lookup", "mtp")]
    drafter = AdaptiveDrafter(sources, StepCosts({0: FLAT}), Survival({}))
    state = drafter.export_state()
    drafter.load_state(state)
    for broken in (state[:-1], state + b"x", b"\1"):
        with pytest.raises((ValueError, AssertionError)):
            drafter.load_state(broken)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(1.0, 1.6), min_size=6, max_size=6),
    st.floats(0, 1),
    st.integers(0, 400),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_no_world_is_slower_than_plain_by_more_than_a_twentieth(
    growth, rate, change_at, later_rate, seed
):
    costs, ms = {1: 10.0}, 10.0
    for rows, factor in zip(ROWS[1:], growth, strict=True):
        ms *= factor
        costs[rows] = ms
    chance = random.Random(seed)

    def holds(step, position):
        return chance.random() < (rate if step < change_at else later_rate)

    world = World(costs, holds)
    world.run([world.source()], 800)
    assert world.speedup > 0.95


@given(st.integers(1, 40), st.integers(0, 5000))
def test_costs_lie_between_what_was_measured(rows, length):
    costs = StepCosts({0: FLAT, 1000: {at: 2 * ms for at, ms in FLAT.items()}})
    low = max(at for at in ROWS if at <= rows)
    high = min((at for at in ROWS if at >= rows), default=32)
    factor = 1 + min(length // 64 * 64, 1000) / 1000
    assert FLAT[low] * factor - 1e-9 <= costs.step_ms(rows, length) <= FLAT[high] * factor + 1e-9


@pytest.mark.parametrize("table", [{}, {0: {}}, {0: {1: 1.0}, 5: {2: 1.0}}, {0: {1: 0.0}}], ids=str)
def test_costs_that_say_nothing_are_refused(table):
    with pytest.raises(ValueError, match=r"cost|step"):
        StepCosts(table)


def test_survival_follows_what_happened_lately():
    survival = Survival({"lookup": (0.6, 0.9)})
    low, high = DraftKind("lookup", 0), DraftKind("lookup", 7)
    assert survival.expected(low, 2) == pytest.approx([0, 0.6, 0.96])
    assert survival.expected(high, 1) == pytest.approx([0, 0.9])
    for _ in range(200):
        survival.observe(low, 8, 8)
    assert survival.expected(low, 8)[8] > 7.2
    assert survival.expected(high, 1) == pytest.approx([0, 0.9])
    for _ in range(100):
        survival.observe(low, 8, 0)
    assert survival.expected(low, 1)[1] < 0.06
    assert survival.expected(low, 0) == [0.0]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=30))
def test_more_tokens_are_never_expected_to_hold_less(seen):
    survival, kind = Survival({}), DraftKind("lookup")
    for num_drafted, num_held in seen:
        survival.observe(kind, num_drafted, min(num_held, num_drafted))
    expected = survival.expected(kind, 30)
    assert len(expected) == 31
    steps = [b - a for a, b in pairwise(expected)]
    assert all(1 >= a >= b >= 0 for a, b in pairwise(steps))


def test_what_lacks_its_context_is_not_asked():
    world = World(FLAT, lambda step, position: True)
    drafter = Always(source="mtp")
    kind = DraftKind("mtp")
    lacking = Source(drafter, lambda: kind, is_free=False, is_ready=lambda length: length > 30)
    world.run([lacking], 40)
    assert set(world.reasons[:20]) == {Idle.NO_CONTEXT}
    assert world.widths[:20] == [0] * 20
    assert 0 < drafter.asked < 20
    assert set(world.widths[-5:]) == {20}


def test_a_source_is_asked_for_no_more_than_it_can_give():
    world = World(FLAT, lambda step, position: True)
    drafter, kind = Always(num_tokens=4, source="mtp"), DraftKind("mtp")
    world.run([Source(drafter, lambda: kind, is_free=False, most_tokens=4)], 40)
    assert set(world.widths[20:]) == {4}


def test_what_drafting_takes_is_not_taken_for_a_slower_model():
    """Else wide drafts that are looked up would look dear, too."""
    world = World(FLAT, lambda step, position: True)
    neural = world.source(DraftKind("dflash"), num_tokens=15, draft_ms=6.0)
    world.run([neural], 200, budget=15)
    assert set(world.widths[20:]) == {15}
    assert world.table.step_ms(16, 0) == pytest.approx(FLAT[16], rel=0.01)
