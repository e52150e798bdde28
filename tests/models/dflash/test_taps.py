"""A drafter reads what transformers calls the hidden states after its target's layers."""

import pytest
import torch

from ragflash.models.decoder import Decoder
from ragflash.models.dflash import Target
from tests.models.families import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE
from tests.models.forwards import batch_of, load, poisoned_pages
from tests.models.toy_files import write_gguf

TEXT = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
def test_taps_are_the_streams_behind_the_layers(name, tmp_path):
    family = FAMILIES[name]
    reference = family.build()
    path = write_gguf(tmp_path / "t.gguf", name, family.metadata, family.tensors(reference))
    model = load(path)
    assert isinstance(model, Decoder)
    num_layers = len(model.parts.blocks)
    taps = (0, num_layers - 2)
    model.reset(0)
    found = model.forward_tapped(batch_of(TEXT, 0), poisoned_pages(model), taps)
    model.reset(0)
    logits = model.forward(batch_of(TEXT, 0), poisoned_pages(model))
    with torch.inference_mode():
        text = torch.tensor([TEXT])
        states = reference.model(text, output_hidden_states=True).hidden_states
    assert len(states) == num_layers + 1
    expected = torch.cat([states[tap + 1][0] for tap in taps], dim=-1)
    torch.testing.assert_close(found.taps, expected, rtol=0, atol=1e-4)
    normed = model.parts.norm(found.stream)
    torch.testing.assert_close(normed, states[-1][0], rtol=0, atol=1e-4)
    assert torch.equal(found.logits, logits)


def test_a_target_is_described_by_its_model(tmp_path):
    family = FAMILIES["gemma4"]
    reference = family.build()
    path = write_gguf(tmp_path / "t.gguf", "gemma4", family.metadata, family.tensors(reference))
    model = load(path)
    assert isinstance(model, Decoder)
    target = Target.of(model)
    assert (target.num_layers, target.hidden_size) == (len(model.parts.blocks), HIDDEN_SIZE)
    assert target.vocab_size == VOCAB_SIZE
    cap = reference.config.final_logit_softcapping
    assert target.soft_cap == cap
    rows = torch.randn(3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)) * 9
    ids = torch.tensor(TEXT[:5])
    with torch.inference_mode():
        logits = reference.lm_head(rows)
        expected = torch.tanh(logits / cap) * cap
        vectors = reference.model.embed_tokens.weight[ids]
    torch.testing.assert_close(target.logits(rows), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(target.embed(ids), vectors, rtol=0, atol=0)
