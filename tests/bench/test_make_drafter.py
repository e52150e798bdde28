"""`make_drafter`: a file of the real sizes, which loads."""

from dataclasses import replace

import pytest
import torch

from ragflash.bench.drafter_shape import DRAFTERS
from ragflash.bench.make_model import make_drafter, write_model
from ragflash.errors import NotFound
from ragflash.models.dflash import DraftSequence, Given, Target, load_drafter
from ragflash.models.dflash.gguf_config import config_from_gguf
from ragflash.models.shapes import device_bytes, model_shape, shape_file

REAL = DRAFTERS["dflash-qwen35-27b"]


def test_the_sizes_are_those_of_the_published_drafter():
    file = REAL.file("drafter")
    config = config_from_gguf(file, Given())
    shape = model_shape(shape_file("qwen35-27b"))
    config.require_fit(
        Target(
            num_layers=64,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            embed=torch.Tensor.float,
            logits=torch.Tensor.float,
        )
    )
    assert config.windows == (2048, 2048, 2048, 2048, None)
    assert [config.is_causal(layer) for layer in range(5)] == [True] * 4 + [False]
    assert len(file.tensors) == 58
    assert 0.95e9 < sum(map(device_bytes, file.tensors.values())) < 1.05e9


def test_a_file_loads_and_drafts(tmp_path):
    vocab_size, toy = 300, replace(
        REAL, hidden_size=256, ffn_size=256, num_heads=4, num_kv_heads=2, head_dim=64, window=8,
        mask_token_id=299, tap_layers=(1, 3),
    )  # fmt: skip
    path = tmp_path / "drafter.gguf"
    write_model(toy.file("toy"), path, seed=1, progress=lambda *_: None)
    table, head = torch.randn(2, vocab_size, 256, generator=torch.Generator().manual_seed(1))
    target = Target(6, 256, vocab_size, lambda ids: table[ids], lambda rows: rows @ head.t())
    sequence = DraftSequence(load_drafter(path, target, dtype=torch.float32), ring_tokens=32)
    sequence.append(table[:20].repeat(1, 2))
    found = sequence.draft(5, 20, width=15)
    assert found.log_probs.isfinite().all()
    assert not torch.equal(sequence.draft(6, 20, width=15).log_probs, found.log_probs)


def test_an_unknown_drafter_is_refused(tmp_path):
    with pytest.raises(NotFound, match="dflash-qwen35-27b"):
        make_drafter("dflash-other", tmp_path / "drafter.gguf")
