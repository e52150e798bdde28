"""A sequence's context can be cut, restarted, stored and given to another."""

import pytest
import torch

from ragflash.gguf.reader import content_hash
from ragflash.models.dflash import Candidates, DraftSequence, drafter_hash, load_drafter
from tests.models.dflash.drafters import (
    BLOCK,
    load_toy,
    make_toy,
    sequence_after,
    write_folder,
)

TOKENS = 20


@pytest.fixture(scope="module")
def toy():
    return make_toy()


@pytest.fixture(scope="module")
def model(toy, tmp_path_factory):
    return load_toy(toy, tmp_path_factory.mktemp("drafter") / "toy")


def assert_same(found: Candidates, expected: Candidates) -> None:
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-5)
    assert found.chain == expected.chain


def draft(sequence: DraftSequence, pending: int = 7) -> Candidates:
    return sequence.draft(pending, sequence.position, BLOCK - 1)


def test_a_stored_state_drafts_the_same(toy, model):
    sequence = sequence_after(model, toy.features(TOKENS))
    other = DraftSequence(model, ring_tokens=64)
    other.load(sequence.export())
    expected, found = draft(sequence), draft(other)
    assert torch.equal(found.log_probs, expected.log_probs)
    assert_same(found, expected)


def test_drafting_leaves_no_trace(toy, model):
    sequence = sequence_after(model, toy.features(TOKENS))
    before = sequence.export()
    draft(sequence)
    assert sequence.export() == before


def test_features_of_rejected_rows_are_forgotten(toy, model):
    features = toy.features(TOKENS + 4)
    sequence = sequence_after(model, features)
    sequence.truncate(TOKENS - 2)
    assert sequence.position == TOKENS - 2
    sequence.append(features[TOKENS - 2 : TOKENS])
    assert_same(draft(sequence), draft(sequence_after(model, features[:TOKENS])))


def test_a_long_prompt_may_begin_late(toy, model):
    features = toy.features(100)
    sequence = DraftSequence(model, ring_tokens=16)
    sequence.restart(100 - 16)
    sequence.append(features[-16:])
    assert sequence.position == 100
    assert_same(draft(sequence), draft(sequence_after(model, features, ring_tokens=16)))


def test_sequences_do_not_see_each_other(toy, model):
    one, other = (sequence_after(model, toy.features(TOKENS, seed=seed)) for seed in (5, 6))
    expected = draft(one)
    other.append(toy.features(30, seed=8))
    assert draft(other).log_probs[0, 0] != expected.log_probs[0, 0]
    assert_same(draft(one), expected)


def test_the_pending_token_matters(toy, model):
    sequence = sequence_after(model, toy.features(TOKENS))
    difference = draft(sequence, 7).log_probs - draft(sequence, 8).log_probs
    assert difference.abs().max() > 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position": TOKENS + 1}, "features end at 20"),
        ({"position": TOKENS - 1}, "features end at 20"),
        ({"width": 0}, "0 slots"),
        ({"width": BLOCK}, "6 slots"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_k": 17}, "top_k = 17"),
    ],
)
def test_refuses_what_it_was_not_trained_for(toy, model, arguments, message):
    sequence = sequence_after(model, toy.features(TOKENS))
    with pytest.raises(ValueError, match=message):
        sequence.draft(**{"pending": 7, "position": TOKENS, "width": 3, "top_k": 4, **arguments})


def test_bfloat16_drafts_nearly_the_same(toy, tmp_path):
    path = write_folder(toy, tmp_path / "toy")
    found, expected = (
        draft(sequence_after(load_drafter(path, toy.target, dtype=dtype), toy.features(TOKENS)))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert (found.log_probs[:, 0] - expected.log_probs[:, 0]).abs().max() < 0.3


def test_a_drafter_is_known_by_all_its_files(toy, tmp_path):
    one, same, other = (write_folder(toy, tmp_path / name) for name in ("one", "same", "other"))
    config = other / "config.json"
    config.write_text(config.read_text().replace('"sliding_window": 8', '"sliding_window": 9'))
    assert drafter_hash(one) == drafter_hash(same) != drafter_hash(other)
    weights = same / "model-2.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    assert drafter_hash(one) != drafter_hash(same)
    assert drafter_hash(weights) == content_hash(weights)
