"""The block of multi-token prediction equals one put together from transformers' layers.

transformers ignores these tensors, so the reference joins the inputs by hand and runs an attention
layer of a Qwen3.5 model that has no other kind.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from ragflash.errors import ModelError
from ragflash.models.qwen35 import Qwen35
from tests.models.families import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE, Tensors
from tests.models.forwards import batch_of, load, poisoned_pages
from tests.models.toy_files import write_gguf

FAMILY = FAMILIES["qwen35"]
EPS = 1e-6
TEXT = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(3)).tolist()


class Reference:
    """The trunk, and the block beside it."""

    def __init__(self) -> None:
        self.trunk = FAMILY.build(seed=1)
        attention_only = replace(FAMILY, config={**FAMILY.config, "num_hidden_layers": 1,
                                                 "layer_types": ["full_attention"]})  # fmt: skip
        self.block = attention_only.build(seed=2)
        generator = torch.Generator().manual_seed(4)
        norms = torch.rand(3, HIDDEN_SIZE, generator=generator) + 0.5
        self.embedding_norm, self.hidden_norm, self.last_norm = norms
        self.join = torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE, generator=generator) / 14

    def tensors(self) -> Tensors:
        """The trunk's file with the block after the last."""
        found = FAMILY.tensors(self.trunk)
        for name, values in FAMILY.tensors(self.block).items():
            if name.startswith("blk.0."):
                found[name.replace("blk.0.", "blk.4.")] = values
        found["blk.4.nextn.enorm.weight"] = self.embedding_norm
        found["blk.4.nextn.hnorm.weight"] = self.hidden_norm
        found["blk.4.nextn.shared_head_norm.weight"] = self.last_norm
        found["blk.4.nextn.eh_proj.weight"] = self.join
        return found

    @torch.inference_mode()
    def trunk_hidden(self) -> torch.Tensor:
        return self.trunk.model(torch.tensor([TEXT])).last_hidden_state[0]

    @torch.inference_mode()
    def further(self, hidden: torch.Tensor, next_ids: list[int]) -> torch.Tensor:
        """Rows of hidden and of the tokens after them, to the hidden rows after those."""
        embedded = self.trunk.model.embed_tokens(torch.tensor(next_ids))
        sides = (_norm(embedded, self.embedding_norm), _norm(hidden, self.hidden_norm))
        joined = functional.linear(torch.cat(sides, dim=-1), self.join)[None]
        positions = torch.arange(len(next_ids))[None]
        hidden_later = torch.full((len(next_ids),) * 2, float("-inf")).triu(1)[None, None]
        out = self.block.model.layers[0](
            joined,
            position_embeddings=self.block.model.rotary_emb(joined, positions),
            attention_mask=hidden_later,
        )
        return _norm(out[0] if out.dim() == 3 else out, self.last_norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.trunk.lm_head(hidden)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (HIDDEN_SIZE,), weight, EPS)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory) -> Qwen35:
    return write_and_load(reference.tensors(), tmp_path_factory.mktemp("mtp") / "toy.gguf")


def write_and_load(tensors: Tensors, path, **metadata: int) -> Qwen35:
    values = {**FAMILY.metadata, "block_count": 5, "nextn_predict_layers": 1, **metadata}
    model = load(write_gguf(path, "qwen35", values, tensors))
    assert isinstance(model, Qwen35)
    return model


def found_logits(model: Qwen35, chunks: list[int], *, normed: bool = True) -> torch.Tensor:
    """Logits of the tokens after the next, then of those one further by the block's own output."""
    pages, outputs, start = poisoned_pages(model), [], 0
    assert model.mtp is not None
    model.reset(0)
    for size in chunks:
        step = model.step(batch_of(TEXT[start : start + size], start), pages)
        hidden = model.final_hidden(step)
        if not normed:
            x, inner = model.embed(model.step(batch_of(TEXT[start : start + size], start), pages))
            for block in model.parts.blocks:
                x = block(x, inner)
            hidden = x
        model.commit(0, range(size))
        following = TEXT[start + 1 : start + size + 1]
        following += [0] * (size - len(following))
        after = model.step(batch_of(following, start), pages)
        outputs.append(model.mtp.hidden(hidden, after))
        start += size
    return model.mtp.logits(torch.cat(outputs))


@pytest.mark.parametrize("chunks", [[70], [64, 6], [1] * 70])
def test_equals_the_reference(reference, model, chunks):
    hidden = reference.further(reference.trunk_hidden(), [*TEXT[1:], 0])
    expected = reference.logits(hidden)
    assert expected.std() > 0.3
    torch.testing.assert_close(found_logits(model, chunks), expected, rtol=0, atol=1e-4)


def test_feeds_itself(reference, model):
    """The second token further: the block reads its own output, and the tokens after the next."""
    pages = poisoned_pages(model)
    model.reset(0)
    hidden = model.final_hidden(model.step(batch_of(TEXT, 0), pages))
    expected = reference.trunk_hidden()
    for shift in (1, 2, 3):
        following = [*TEXT[shift:], *[0] * shift]
        hidden = model.mtp.hidden(hidden, model.step(batch_of(following, 0), pages))
        expected = reference.further(expected, following)
        torch.testing.assert_close(hidden, expected, rtol=0, atol=5e-4)
    torch.testing.assert_close(
        model.mtp.logits(hidden), reference.logits(expected), rtol=0, atol=5e-4
    )


def test_the_trunk_does_not_depend_on_the_block(reference, model):
    pages = poisoned_pages(model)
    model.reset(0)
    expected = reference.logits(reference.trunk_hidden())
    found = model.forward(batch_of(TEXT, 0), pages)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert len(model.kv_layout.layers) == 2


@pytest.mark.parametrize("mistake", ["inputs swapped", "hidden rows before the last norm"])
def test_mistakes_show(reference, model, tmp_path, mistake):
    expected = reference.logits(reference.further(reference.trunk_hidden(), [*TEXT[1:], 0]))
    if mistake == "inputs swapped":
        tensors = reference.tensors()
        join = tensors["blk.4.nextn.eh_proj.weight"]
        tensors["blk.4.nextn.eh_proj.weight"] = join.roll(HIDDEN_SIZE, dims=1)
        found = found_logits(write_and_load(tensors, tmp_path / "wrong.gguf"), [70])
    else:
        found = found_logits(model, [70], normed=False)
    assert (found - expected).abs().max() > 0.01


def test_a_file_may_have_a_head_and_an_embedding_for_the_block_alone(reference, tmp_path):
    tensors = reference.tensors()
    plain = found_logits(write_and_load(dict(tensors), tmp_path / "plain.gguf"), [70])
    tensors["blk.4.nextn.shared_head_head.weight"] = tensors["output.weight"] * 2
    tensors["blk.4.nextn.embed_tokens.weight"] = tensors["token_embd.weight"].clone()
    own = found_logits(write_and_load(tensors, tmp_path / "own.gguf"), [70])
    torch.testing.assert_close(own, 2 * plain)


def test_refuses_more_blocks_than_one(reference, tmp_path):
    with pytest.raises(ModelError, match="2 blocks of multi-token prediction"):
        write_and_load(reference.tensors(), tmp_path / "two.gguf", nextn_predict_layers=2)
