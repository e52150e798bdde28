"""What was learned of drafts is there after a restart, by document, model and drafters."""

import json

import pytest

from ragflash.engine.learned import MOST_DOCUMENTS, Learned, learned_path
from ragflash.gguf.disk_cache import read_checked, write_checked
from ragflash.speculative.survival import DraftKind, Survival
from tests.engine.drafted import ask, start, write_target

PRIORS = {"lookup": (0.6, 0.8)}
KIND, OTHER = DraftKind("lookup", 1), DraftKind("dflash_tree")


def taught(learned: Learned) -> list[float]:
    """Have a document's drafts hold now and then; return what is expected of them."""
    survival = learned.of("contracts", ["one"])
    for step in range(9):
        survival.observe(KIND, 8, step % 5)
        survival.observe(OTHER, 3, 1)
    return expected(learned)


def expected(learned: Learned, *source_ids: str) -> list[float]:
    survival = learned.of("contracts", source_ids or ["one"])
    return survival.expected(KIND, 8) + survival.expected(OTHER, 3)


def test_rates_come_back_for_their_document_alone(tmp_path):
    path = tmp_path / "cache" / "drafts.json"
    first = Learned(PRIORS, path)
    known, nothing = taught(first), expected(Learned(PRIORS))
    first.save()
    again = Learned(PRIORS, path)
    assert expected(again) == pytest.approx(known, abs=1e-3)
    assert known != pytest.approx(nothing, abs=1e-2)
    assert expected(again, "two") == nothing
    stored = read_checked(path)
    assert b"one" not in stored
    assert b"contracts" not in stored


def test_what_cannot_be_understood_begins_anew(tmp_path):
    path, nothing = tmp_path / "drafts.json", expected(Learned(PRIORS))
    first = Learned(PRIORS, path)
    taught(first)
    first.save()
    told = json.loads(read_checked(path))
    write_checked(path, json.dumps(told | {"version": 0}).encode())
    assert expected(Learned(PRIORS, path)) == nothing
    path.write_bytes(b"damaged")
    assert expected(Learned(PRIORS, path)) == nothing


def test_rates_of_other_positions_begin_anew():
    survival = Survival(PRIORS)
    survival.load_state({"lookup/1": [[0.0, 9.0]]})
    assert survival.expected(KIND, 8) == Survival(PRIORS).expected(KIND, 8)


def test_a_folder_that_cannot_be_written_is_said_and_no_more(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    learned = Learned(PRIORS, tmp_path / "file" / "drafts.json")
    taught(learned)
    learned.save()
    assert "not kept" in caplog.text


def test_those_asked_about_last_are_kept():
    learned = Learned(PRIORS)
    known = taught(learned)
    for number in range(MOST_DOCUMENTS - 1):
        learned.of("contracts", [f"{number}"])
    assert expected(learned) == known
    for number in range(MOST_DOCUMENTS):
        learned.of("contracts", [f"more {number}"])
    assert expected(learned) != known


def test_models_and_drafters_have_files_of_their_own(tmp_path):
    paths = {
        learned_path(tmp_path, model, drafters)
        for model in ("a", "b")
        for drafters in ({}, {"mtp": "a"}, {"dflash": "c"})
    }
    assert len(paths) == 6
    assert learned_path(None, "a", {}) is None


def test_an_engine_keeps_what_it_learned(tmp_path):
    path, folder = write_target(tmp_path / "toy", "llama"), tmp_path / "cache"
    with start(path, drafts=True, cache_dir=folder) as engine:
        known = taught(engine._drafting.learned)
    with start(path, drafts=True, cache_dir=folder) as engine:
        assert expected(engine._drafting.learned) == pytest.approx(known, abs=1e-3)
        ask(engine, max_tokens=2)
