"""A block of multi-token prediction put together from transformers' layers, and its toy file.

transformers ignores these tensors, so the inputs are joined by hand, and the attention layer is
that of a Qwen3.5 model which has no other kind.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

from ragflash.models.qwen35 import Qwen35
from tests.models.families import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE, Family, Tensors
from tests.models.forwards import load
from tests.models.toy_files import write_gguf

FAMILY = FAMILIES["qwen35"]
EPS = 1e-6


class MtpReference:
    """The trunk, and the block beside it."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, family: Family = FAMILY) -> None:
        self.family = family
        self.trunk = family.build(seed=1, vocab_size=vocab_size)
        one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        attention_only = replace(family, config={**family.config, **one_layer})
        self.block = attention_only.build(seed=2, vocab_size=vocab_size)
        generator = torch.Generator().manual_seed(4)
        norms = torch.rand(3, HIDDEN_SIZE, generator=generator) + 0.5
        self.embedding_norm, self.hidden_norm, self.last_norm = norms
        self.join = torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE, generator=generator) / 14

    def tensors(self) -> Tensors:
        """The trunk's file with the block after the last."""
        found = self.family.tensors(self.trunk)
        for name, values in self.family.tensors(self.block).items():
            if name.startswith("blk.0."):
                found[name.replace("blk.0.", "blk.4.")] = values
        found["blk.4.nextn.enorm.weight"] = self.embedding_norm
        found["blk.4.nextn.hnorm.weight"] = self.hidden_norm
        found["blk.4.nextn.shared_head_norm.weight"] = self.last_norm
        found["blk.4.nextn.eh_proj.weight"] = self.join
        return found

    @torch.inference_mode()
    def trunk_hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Rows of a text after the last norm."""
        return self.trunk.model(torch.tensor([token_ids])).last_hidden_state[0]

    @torch.inference_mode()
    def further(
        self, hidden: torch.Tensor, next_ids: Sequence[int], *, normed: bool = True
    ) -> torch.Tensor:
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
        rows = out[0] if out.dim() == 3 else out
        return _norm(rows, self.last_norm) if normed else rows

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, *, normed: bool = True) -> torch.Tensor:
        """Logits of what `further` returned."""
        return self.trunk.lm_head(hidden if normed else _norm(hidden, self.last_norm))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (HIDDEN_SIZE,), weight, EPS)


def write_and_load(tensors: Tensors, path: Path, **metadata: int) -> Qwen35:
    values = {**FAMILY.metadata, "block_count": 5, "nextn_predict_layers": 1, **metadata}
    model = load(write_gguf(path, "qwen35", values, tensors))
    assert isinstance(model, Qwen35)
    return model
