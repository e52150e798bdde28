"""Where a drafter's tensors come from, and what each source calls them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from ragflash.models.layers import Norm
from ragflash.models.linear import Embedding, Linear, PackedEmbedding

Names = Mapping[str, tuple[str, ...]]  # of each part, all that it may be called; {} is the layer

GGUF_NAMES: Names = MappingProxyType(
    {
        "features": ("fc.weight", "dflash.fc.weight", "dflash_fc.weight"),
        "features_norm": (
            "enc.output_norm.weight",
            "hidden_norm.weight",
            "dflash.hidden_norm.weight",
            "dflash_hidden_norm.weight",
        ),
        "norm": ("output_norm.weight",),
        "attention_norm": ("blk.{}.attn_norm.weight",),
        "ffn_norm": ("blk.{}.ffn_norm.weight", "blk.{}.post_attention_norm.weight"),
        "query": ("blk.{}.attn_q.weight",),
        "key": ("blk.{}.attn_k.weight",),
        "value": ("blk.{}.attn_v.weight",),
        "output": ("blk.{}.attn_output.weight",),
        "q_norm": ("blk.{}.attn_q_norm.weight",),
        "k_norm": ("blk.{}.attn_k_norm.weight",),
        "gate": ("blk.{}.ffn_gate.weight",),
        "up": ("blk.{}.ffn_up.weight",),
        "down": ("blk.{}.ffn_down.weight",),
        "attention_conv_base": ("blk.{}.attn_conv_base", "blk.{}.attn_conv.base"),
        "attention_conv": ("blk.{}.attn_conv_proj.weight", "blk.{}.attn_conv.proj.weight"),
        "ffn_conv_base": ("blk.{}.ffn_conv_base", "blk.{}.ffn_conv.base"),
        "ffn_conv": ("blk.{}.ffn_conv_proj.weight", "blk.{}.ffn_conv.proj.weight"),
        "selector": ("selector_hidden.weight", "selector.hidden_proj.weight"),
        "selector_before": ("selector_predecessor.weight", "selector.pred_codebook"),
        "selector_after": ("selector_successor.weight", "selector.succ_codebook"),
    }
)
SAFETENSORS_NAMES: Names = MappingProxyType(
    {
        "features": ("fc.weight",),
        "features_norm": ("hidden_norm.weight",),
        "norm": ("norm.weight",),
        "attention_norm": ("layers.{}.input_layernorm.weight",),
        "ffn_norm": ("layers.{}.post_attention_layernorm.weight",),
        "query": ("layers.{}.self_attn.q_proj.weight",),
        "key": ("layers.{}.self_attn.k_proj.weight",),
        "value": ("layers.{}.self_attn.v_proj.weight",),
        "output": ("layers.{}.self_attn.o_proj.weight",),
        "q_norm": ("layers.{}.self_attn.q_norm.weight",),
        "k_norm": ("layers.{}.self_attn.k_norm.weight",),
        "gate": ("layers.{}.mlp.gate_proj.weight",),
        "up": ("layers.{}.mlp.up_proj.weight",),
        "down": ("layers.{}.mlp.down_proj.weight",),
        "attention_conv_base": ("layers.{}.attention_conv.base_kernel",),
        "attention_conv": ("layers.{}.attention_conv.kernel_projection.weight",),
        "ffn_conv_base": ("layers.{}.mlp_conv.base_kernel",),
        "ffn_conv": ("layers.{}.mlp_conv.kernel_projection.weight",),
        "selector": ("candidate_selector.hidden_projection.weight",),
        "selector_before": (
            "candidate_selector.predecessor_codebook",
            "candidate_selector.predecessor_codebook.weight",
        ),
        "selector_after": (
            "candidate_selector.successor_codebook",
            "candidate_selector.successor_codebook.weight",
        ),
    }
)


class TensorSource(Protocol):
    """What a drafter asks of `WeightReader`, which this describes, and of `SafetensorsReader`."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of the name."""

    def norm(self, name: str, size: int, eps: float) -> Norm:
        """Return a norm by the weights `[size]` of a tensor."""

    def linear(
        self, names: Sequence[str], *, in_features: int, out_features: Sequence[int]
    ) -> Linear:
        """Return matrices `[out, in]` side by side."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as float32."""

    def packed_embedding(
        self, name: str, vocab_size: int, hidden_size: int
    ) -> Embedding | PackedEmbedding:
        """Return a table of one row a token."""

    def require_all_used(self) -> None:
        """Raise `ModelError` when there are tensors that nobody asked for."""
