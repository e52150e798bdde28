"""A drafter's rows and proposals equal those of Z Lab's own package."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from ragflash.models.dflash import Causality, DraftSequence, Given
from tests.models.dflash.drafters import (
    BLOCK,
    FULL,
    HIDDEN,
    MASK,
    SLIDING,
    WINDOW,
    load_toy,
    make_toy,
    run_target,
    sequence_after,
    small_target,
    target_of,
    zlab,
)

PENDING = 7
LAYERS = {"full": (FULL,), "sliding": (SLIDING,), "mixed": (SLIDING, SLIDING, FULL)}


def rows_of(model, features, width, ring_tokens=64):
    """Our rows of a block behind features, the pending token's first."""
    ring = model.new_ring(ring_tokens)
    if len(features):
        ring.append(model.context(features, 0))
    return model.hidden([PENDING, *[MASK] * width], ring)


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("layers", LAYERS)
def test_rows_of_a_block(layers, is_causal, second, tmp_path):
    toy = make_toy(LAYERS[layers], is_causal=is_causal, second=second)
    model = load_toy(toy, tmp_path / "toy")
    for num_tokens, width in ((0, 3), (1, 5), (5, 2), (WINDOW - 1, 5), (WINDOW, 1), (30, 5)):
        features = toy.features(num_tokens)
        expected = toy.hidden(features, [PENDING, *[MASK] * width], num_tokens)
        assert expected.std() > 0.3
        torch.testing.assert_close(rows_of(model, features, width), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "mistake",
    ["theta", "window", "causal", "never causal", "taps in another order", "scaled vectors"],
)
def test_mistakes_show(mistake, tmp_path):
    toy = make_toy()
    features, width = toy.features(30), 5
    expected = toy.hidden(features, [PENDING, *[MASK] * width], 30)
    wrong, given = toy, Given()
    if mistake == "theta":
        wrong = replace(toy, config={**toy.config, "rope_theta": 2e4})
    elif mistake == "window":
        given = Given(windows=(WINDOW + 1, WINDOW, None))
    elif mistake == "causal":
        given = Given(causality=Causality.ALWAYS)
    elif mistake == "never causal":
        given = Given(causality=Causality.NEVER)
    elif mistake == "scaled vectors":
        given = Given(embedding_scale=8.0)
    else:
        features = features.roll(HIDDEN, dims=1)
    found = rows_of(load_toy(wrong, tmp_path / "toy", given), features, width)
    assert (found - expected).abs().max() > 0.01


@pytest.mark.parametrize("chunks", [(40,), (1,) * 40, (3, 20, 1, 1, 15)])
def test_a_ring_that_wraps_equals_the_whole_context_where_all_layers_have_windows(chunks, tmp_path):
    toy = make_toy((SLIDING,) * 3)
    model = load_toy(toy, tmp_path / "toy")
    features, seen = toy.features(40), 0
    sequence = DraftSequence(model, ring_tokens=WINDOW)
    for size in chunks:
        sequence.append(features[seen : seen + size])
        seen += size
        found = sequence.draft(PENDING, seen, BLOCK - 1)
        rows = toy.hidden(features[:seen], [PENDING, *[MASK] * (BLOCK - 1)], seen)[1:]
        expected = toy.target.logits(rows).log_softmax(dim=-1)
        torch.testing.assert_close(
            found.log_probs, expected.gather(1, found.token_ids), rtol=0, atol=1e-4
        )


def test_a_layer_without_a_window_sees_what_the_ring_holds_at_true_positions(tmp_path):
    toy = make_toy((FULL, FULL))
    model = load_toy(toy, tmp_path / "toy")
    features = toy.features(50)
    expected = toy.hidden(features[-16:], [PENDING, MASK, MASK], 50)
    found = rows_of(model, features, 2, ring_tokens=16)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_candidates_are_the_best_of_each_slot_with_their_log_probabilities(tmp_path):
    toy = make_toy()
    sequence = sequence_after(load_toy(toy, tmp_path / "toy"), toy.features(20))
    found = sequence.draft(PENDING, 20, width=4, top_k=16)
    rows = toy.hidden(toy.features(20), [PENDING, *[MASK] * 4], 20)[1:]
    expected = toy.target.logits(rows).log_softmax(dim=-1).topk(16)
    assert found.token_ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(found.log_probs, expected.values, rtol=0, atol=1e-4)
    assert found.chain == tuple(expected.indices[:, 0].tolist())


def test_scale_of_the_output_and_soft_cap_are_applied_as_there(tmp_path):
    toy = make_toy(output_multiplier=0.5, final_logit_softcapping=2.0)
    plain = toy.target
    target = replace(
        plain, logits=lambda rows: torch.tanh(plain.logits(rows) / 2.0) * 2.0, soft_cap=2.0
    )
    model = load_toy(toy, tmp_path / "toy", target=target)
    found = sequence_after(model, toy.features(20)).draft(PENDING, 20, width=3, top_k=4)
    rows = toy.hidden(toy.features(20), [PENDING, MASK, MASK, MASK], 20)[1:]
    logits = toy.model.compute_logits(rows, lambda hidden: hidden @ toy.head.t())
    expected = logits.log_softmax(dim=-1).gather(1, found.token_ids)
    torch.testing.assert_close(found.log_probs, expected, rtol=0, atol=1e-4)


class Recorded(torch.nn.Module):
    """A target that remembers the blocks it was given."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.model, self.blocks = model, []

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, input_ids, past_key_values, **options):
        self.blocks.append(input_ids[0].tolist())
        return self.model(input_ids, cache=past_key_values, **options)


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_proposes_the_same_blocks_while_an_answer_grows(second, tmp_path):
    vocab_size, prompt = 6, [3, 1, 4, 1, 5, 2, 0]
    toy, model = make_toy(second=second, vocab_size=vocab_size), small_target(vocab_size)
    recorded = Recorded(model)
    zlab().dflash_generate(toy.model, recorded, torch.tensor([prompt]), 24, None)
    blocks = [block for block in recorded.blocks[1:] if len(block) == BLOCK]
    sequence = DraftSequence(
        load_toy(toy, tmp_path / "toy", target=target_of(model)), ring_tokens=64
    )
    tokens, accepted = [*prompt, blocks[0][0]], []
    for block in blocks:
        taps, _ = run_target(model, tokens)
        sequence.append(taps[sequence.position : len(tokens) - 1])
        drafted = sequence.draft(tokens[-1], len(tokens) - 1, BLOCK - 1, top_k=3)
        assert [tokens[-1], *drafted.chain] == block
        _, choices = run_target(model, [*tokens, *drafted.chain])
        choices = choices[len(tokens) - 1 :]
        held = 0
        while held < BLOCK - 1 and choices[held] == drafted.chain[held]:
            held += 1
        tokens += choices[: held + 1]
        accepted.append(held)
    assert len(accepted) > 5
    assert max(accepted) > 0
