"""The block of multi-token prediction equals one put together from transformers' layers."""

import pytest
import torch

from ragflash.errors import ModelError
from ragflash.models.qwen35 import Qwen35
from tests.models.families import HIDDEN_SIZE, VOCAB_SIZE
from tests.models.forwards import batch_of, poisoned_pages
from tests.models.mtp_reference import MtpReference, write_and_load

TEXT = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def reference() -> MtpReference:
    return MtpReference()


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory) -> Qwen35:
    return write_and_load(reference.tensors(), tmp_path_factory.mktemp("mtp") / "toy.gguf")


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
    hidden = reference.further(reference.trunk_hidden(TEXT), [*TEXT[1:], 0])
    expected = reference.logits(hidden)
    assert expected.std() > 0.3
    torch.testing.assert_close(found_logits(model, chunks), expected, rtol=0, atol=1e-4)


def test_feeds_itself(reference, model):
    """The second token further: the block reads its own output, and the tokens after the next."""
    pages = poisoned_pages(model)
    model.reset(0)
    hidden = model.final_hidden(model.step(batch_of(TEXT, 0), pages))
    expected = reference.trunk_hidden(TEXT)
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
    expected = reference.logits(reference.trunk_hidden(TEXT))
    found = model.forward(batch_of(TEXT, 0), pages)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert len(model.kv_layout.layers) == 2


@pytest.mark.parametrize("mistake", ["inputs swapped", "hidden rows before the last norm"])
def test_mistakes_show(reference, model, tmp_path, mistake):
    expected = reference.logits(reference.further(reference.trunk_hidden(TEXT), [*TEXT[1:], 0]))
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
