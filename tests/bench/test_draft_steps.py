"""Steps of a large model with lookups and with drafters: on a toy and a CPU."""

import json
import statistics
from dataclasses import replace

import pytest

from ragflash.bench import draft_steps, drafting
from ragflash.bench.draft_projection import project
from ragflash.bench.draft_steps import OWN, VERIFIED, SeekingDrafter
from ragflash.bench.drafter_shape import DRAFTERS
from ragflash.bench.make_model import write_model
from ragflash.bench.record import build, read_series
from ragflash.bench.stub_drafter import WatchedDrafter
from ragflash.errors import Conflict
from ragflash.speculative.drafter import Draft
from ragflash.speculative.lookup import LookupDrafter, SourceIndex
from tests.bench.test_make_model import write_toy

DEPTHS = (100,)
BEGUN = {"command": "bench", "date": "today", "commit": "abc", "load_1m": 0.5}
DRAFTER = replace(
    DRAFTERS["dflash-qwen35-27b"],
    **{"hidden_size": 256, "ffn_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    **{"window": 64, "mask_token_id": 511, "tap_layers": (1, 2)},
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write_model(DRAFTER.file("toy"), folder / "drafter.gguf", seed=1, progress=lambda *_: None)
    model = write_toy(folder / "toy.gguf", mtp=True)
    options = {"kv_format": "auto", "depths": DEPTHS, "steps": 1, "runs": 1}
    return draft_steps.Plan(model=model, drafter=folder / "drafter.gguf", device="cpu", **options)


@pytest.fixture(scope="module")
def kept(plan):
    """What was kept after each row of the large model, and no small one."""
    kept = []
    whole = drafting.Plan(prose="", rows=(), large=plan)
    drafting.measure(whole, pytest.fail, lambda *_: None, kept.append, begun=BEGUN)
    return [json.loads(json.dumps(build("drafting", BEGUN, one))) for one in kept]


def test_lookups_come_first_and_each_row_is_kept(kept):
    missing = [[row for row in result["missing"] if row.startswith("large_")] for result in kept]
    assert missing == [["large_drafters_100"], []]
    assert kept[0]["model"] is None
    assert kept[0]["parameters"]["large"]["model"] == "toy.gguf"


def test_every_depth_has_steps_with_lookups_and_without(kept):
    measured = read_series(kept[-1])
    for depth in DEPTHS:
        known = measured[f"verify16_ms_depth{depth}"].values
        sought = measured[f"verify16_with_draft_ms_depth{depth}"].values
        assert len(known) == len(sought) >= 1
        (extra,) = measured[f"draft_extra_ms_depth{depth}"].values
        assert extra == statistics.median(sought) - statistics.median(known)
        assert min(measured[f"seek_us_depth{depth}"].values) > 0


def test_every_drafter_has_its_steps_and_what_it_adds_to_them(kept):
    measured = read_series(kept[-1])
    for depth in DEPTHS:
        for name, rows in zip(OWN, VERIFIED, strict=True):
            (found,) = measured[f"{name}_rows_depth{depth}"].values
            assert found == rows
            steps = measured[f"{name}_step_ms_depth{depth}"].values
            proposing = measured[f"{name}_propose_ms_depth{depth}"].values
            assert 0 < min(proposing) < max(steps)
            (added,) = measured[f"{name}_adds_ms_depth{depth}"].values
            base = statistics.median(measured[f"verify{rows}_ms_depth{depth}"].values)
            assert added == statistics.median(steps) - base
        assert measured[f"told_plain_ms_depth{depth}"].values[0] > 0
    assert "refused" not in kept[-1]["parameters"]["large"]


def test_a_later_run_goes_on_with_the_depths_that_lack(kept, plan):
    whole = drafting.Plan(prose="", rows=(), large=plan)
    nothing = drafting.measure(
        whole, pytest.fail, lambda *_: None, pytest.fail, begun=BEGUN, earlier=kept[-1]
    )
    assert nothing.parameters["projected"] == kept[-1]["parameters"]["projected"]
    other = replace(whole, large=replace(plan, drafter=None, steps=2))
    with pytest.raises(Conflict, match="steps 1 there, 2 here"):
        drafting.measure(other, pytest.fail, lambda *_: None, begun=BEGUN, earlier=kept[0])


def test_projections_follow_from_the_samples_in_the_file(kept):
    parameters = kept[-1]["parameters"]
    assert project(read_series(kept[-1]), parameters["rows"]) == parameters["projected"]
    sources = [row["source"] for row in parameters["projected"] if row["depth"] == 100]
    assert sources == 6 * ["mtp4"] + 4 * ["dflash"] + 3 * ["tree"]
    assert all(row["projected"] is True for row in parameters["projected"])


def test_a_model_without_drafters_has_lookups_alone(tmp_path):
    model = write_toy(tmp_path / "toy.gguf")
    plan = draft_steps.Plan(model=model, depths=(0, 9))
    assert draft_steps.rows_missing(plan, ()) == [("lookup", 0), ("lookup", 9)]
    lacking = draft_steps.rows_missing(plan, ["verify16_with_draft_ms_depth0"])
    assert lacking == [("lookup", 9)]


def test_the_lookup_follows_a_copy_while_known_tokens_are_proposed():
    source = [*range(100, 300)]
    lookup = LookupDrafter([SourceIndex.build(source)], source, written_from=len(source))
    drafter = SeekingDrafter(
        [1, 2, 3, 4, 5, 6, 7, 8], 2, 3, lookup=lookup, source=source, copied=[*source]
    )
    assert drafter.propose([0, 0, 1, 2, 3, 4], 9).token_ids == (5, 6, 7)
    assert drafter.copied == [*source, 100, 101, 102, 103]
    assert lookup.match is not None
    assert (lookup.match.source, lookup.match.length) == ("lookup", 4)
    assert len(drafter.seek_us) == 1


def test_only_steps_of_whole_proposals_are_timed():
    class Counting:
        """Proposes fewer and fewer tokens."""

        def __init__(self, counts):
            self.counts = iter(counts)

        def propose(self, history, budget):
            return Draft((1,) * next(self.counts), "test")

    watched = WatchedDrafter(Counting([4, 4, 4, 2, 4, 1]))
    for _ in range(6):
        watched.propose([0], 9)
    began = [asked[0] for asked in watched.asked_at]
    assert watched.num_drafted == 4
    wanted = [1000 * (began[at + 1] - began[at]) for at in (1, 2, 4)]
    assert watched.step_times_ms() == pytest.approx(wanted)
    assert len(watched.propose_times_ms()) == 3
