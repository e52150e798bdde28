"""Sizes of DFlash drafters, for files with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ragflash.gguf.header import MetadataValue
from ragflash.gguf.reader import GGUFFile, TensorInfo

_ARCHITECTURE = "qwen35-dflash-draft"  # whose rule makes layers with windows causal
_VECTORS = GGMLQuantizationType.F32
_MATRICES = GGMLQuantizationType.Q4_K


@dataclass(frozen=True, slots=True)
class DrafterSizes:
    """What a drafter's file states; see `DFlashConfig`."""

    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    slides: tuple[bool, ...]
    window: int
    rope_theta: float
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]

    def file(self, name: str) -> GGUFFile:
        """Return metadata and tensor table, without data."""
        tensors = [_tensor(*entry) for entry in self._tensors().items()]
        metadata = {f"{_ARCHITECTURE}.{key}": value for key, value in self._metadata().items()} | {
            "general.architecture": _ARCHITECTURE
        }
        return GGUFFile([Path(name)], [], metadata, {tensor.name: tensor for tensor in tensors})

    def _metadata(self) -> dict[str, MetadataValue]:
        return {
            "embedding_length": self.hidden_size,
            "block_count": len(self.slides),
            "feed_forward_length": self.ffn_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": self.slides,
            "rope.freq_base": self.rope_theta,
            "dflash.block_size": self.block_size,
            "dflash.mask_token_id": self.mask_token_id,
            "dflash.target_layer_ids": self.tap_layers,
        }

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, head_dim = self.hidden_size, self.head_dim
        queries, keys = self.num_heads * head_dim, self.num_kv_heads * head_dim
        tensors: dict[str, tuple[int, ...]] = {
            "dflash.fc.weight": (hidden, len(self.tap_layers) * hidden),
            "dflash.hidden_norm.weight": (hidden,),
            "output_norm.weight": (hidden,),
        }
        for layer in range(len(self.slides)):
            of_layer = {
                "attn_norm": (hidden,),
                "ffn_norm": (hidden,),
                "attn_q": (queries, hidden),
                "attn_k": (keys, hidden),
                "attn_v": (keys, hidden),
                "attn_output": (hidden, queries),
                "attn_q_norm": (head_dim,),
                "attn_k_norm": (head_dim,),
                "ffn_gate": (self.ffn_size, hidden),
                "ffn_up": (self.ffn_size, hidden),
                "ffn_down": (hidden, self.ffn_size),
            }
            tensors |= {f"blk.{layer}.{part}.weight": shape for part, shape in of_layer.items()}
        return tensors


DRAFTERS: Mapping[str, DrafterSizes] = MappingProxyType(
    {
        "dflash-qwen35-27b": DrafterSizes(
            hidden_size=5120,
            ffn_size=17408,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            slides=(True, True, True, True, False),
            window=2048,
            rope_theta=1e7,
            block_size=16,
            mask_token_id=248070,
            tap_layers=(1, 16, 31, 46, 61),
        )
    }
)


def _tensor(name: str, shape: tuple[int, ...]) -> TensorInfo:
    kind = _VECTORS if len(shape) == 1 else _MATRICES
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    return TensorInfo(name, shape, kind, 0, prod(shape) // block_values * block_bytes)
