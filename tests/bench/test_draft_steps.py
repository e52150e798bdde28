"""Steps of a large model with lookups: on a toy and a CPU."""

import statistics

import pytest

from ragflash.bench import draft_steps
from ragflash.bench.draft_steps import SeekingDrafter
from ragflash.speculative.lookup import LookupDrafter, SourceIndex
from tests.bench.test_make_model import write_toy


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    toy = write_toy(tmp_path_factory.mktemp("made") / "toy.gguf")
    options = {"device": "cpu", "kv_format": "auto", "depths": (0, 300), "steps": 1, "runs": 2}
    return draft_steps.measure(toy, lambda *_: None, **options)


def test_every_depth_has_steps_with_lookups_and_without(measured):
    for depth in (0, 300):
        known = measured[f"verify16_ms_depth{depth}"].values
        sought = measured[f"verify16_with_draft_ms_depth{depth}"].values
        assert len(known) == len(sought) >= 2
        (extra,) = measured[f"draft_extra_ms_depth{depth}"].values
        assert extra == statistics.median(sought) - statistics.median(known)
        assert min(measured[f"seek_us_depth{depth}"].values) > 0


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
