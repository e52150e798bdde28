"""Toy drafters: made with Z Lab's own package, written as each converter writes its files.

Random weights throughout, norms away from 1. Heads times their size is not the hidden size.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from ragflash.models.dflash import DFlashModel, DraftSequence, Given, Target, load_drafter

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 32, 96, 96
TARGET_LAYERS, TAPS = 9, (1, 4, 6)
BLOCK, MASK, WINDOW, THETA = 6, VOCAB - 1, 8, 1e4
EPS = 2.0**-20  # the same number in float32 and in JSON
SLIDING, FULL = "sliding_attention", "full_attention"
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 5}

Tensors = dict[str, torch.Tensor]


def zlab() -> object:
    """Z Lab's module; a missing one is a fault of the installation, not a reason to skip."""
    if find_spec("dflash") is None:
        pytest.fail("dflash is not installed: run `make install`")
    import dflash.model

    return dflash.model


def values(shape: Sequence[int], *, seed: int) -> torch.Tensor:
    """Normal numbers that keep the scale of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator) * 1.6 / shape[-1] ** 0.5


@dataclass(frozen=True)
class Toy:
    """One drafter of Z Lab's, and a target of two tables."""

    model: torch.nn.Module
    config: Mapping[str, object]
    table: torch.Tensor
    head: torch.Tensor

    @property
    def target(self) -> Target:
        return Target(
            num_layers=TARGET_LAYERS,
            hidden_size=HIDDEN,
            vocab_size=len(self.table),
            embed=lambda ids: self.table[ids],
            logits=lambda rows: rows.float() @ self.head.t(),
        )

    @property
    def tensors(self) -> Tensors:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def features(self, num_tokens: int, seed: int = 5) -> torch.Tensor:
        return torch.randn(
            num_tokens, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(seed)
        )

    @torch.inference_mode()
    def hidden(self, features: torch.Tensor, token_ids: Sequence[int], end: int) -> torch.Tensor:
        """Z Lab's rows of a block behind features of the tokens just before position `end`."""
        first = end - len(features)
        return self.model(
            target_hidden=features[None],
            noise_embedding=functional.embedding(torch.tensor([token_ids]), self.table),
            position_ids=torch.arange(first, end + len(token_ids))[None],
        )[0]


def make_toy(
    layer_types: Sequence[str] = (SLIDING, SLIDING, FULL),
    *,
    is_causal: bool | None = None,
    second: bool = False,
    vocab_size: int = VOCAB,
    **changes: object,
) -> Toy:
    """Make a drafter; `second` has DFlash 2's convolutions and selector."""
    config = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "num_target_layers": TARGET_LAYERS,
        "block_size": BLOCK,
        "dflash_config": {
            "mask_token_id": vocab_size - 1,
            "target_layer_ids": list(TAPS),
            **(SECOND if second else {}),
        },
        **({} if is_causal is None else {"is_causal": is_causal}),
        **changes,
    }
    module = zlab()
    kind = module.DFlash2DraftModel if second else module.DFlashDraftModel
    model = kind(Qwen3Config(**config)).eval()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = values(parameter.shape, seed=seed)
    table, head = (values((vocab_size, HIDDEN), seed=seed) for seed in (1001, 1002))
    return Toy(model, config, table * 4, head)


def write_folder(toy: Toy, folder: Path, config: Mapping[str, object] | None = None) -> Path:
    """Write safetensors in two parts and `config.json`, as Z Lab publishes them."""
    folder.mkdir(parents=True)
    codebooks = ("predecessor_codebook.weight", "successor_codebook.weight")
    named = {
        name.removesuffix(".weight") if name.endswith(codebooks) else name: value
        for name, value in toy.tensors.items()
    }
    names = sorted(named)
    save_file({name: named[name] for name in names[::2]}, folder / "model-1.safetensors")
    save_file({name: named[name] for name in names[1::2]}, folder / "model-2.safetensors")
    (folder / "config.json").write_text(json.dumps(toy.config if config is None else config))
    return folder


def load_toy(
    toy: Toy, folder: Path, given: Given | None = None, *, target: Target | None = None
) -> DFlashModel:
    """Write a folder and load it."""
    path = write_folder(toy, folder)
    return load_drafter(path, target or toy.target, dtype=torch.float32, given=given)


def sequence_after(
    model: DFlashModel, features: torch.Tensor, ring_tokens: int = 64
) -> DraftSequence:
    """A sequence that has seen features."""
    sequence = DraftSequence(model, ring_tokens)
    sequence.append(features)
    return sequence


def small_target(vocab_size: int) -> Qwen3ForCausalLM:
    """Few tokens, so that even random drafts are accepted now and then."""
    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=TARGET_LAYERS,
        vocab_size=vocab_size,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def target_of(model: Qwen3ForCausalLM) -> Target:
    return Target(
        num_layers=model.config.num_hidden_layers,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        embed=model.model.embed_tokens,
        logits=model.lm_head,
    )


@torch.inference_mode()
def run_target(model: Qwen3ForCausalLM, token_ids: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Features of a text's tokens, and the likeliest token behind each."""
    output = model(torch.tensor([token_ids]), output_hidden_states=True)
    taps = torch.cat([output.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
    return taps, output.logits[0].argmax(dim=-1).tolist()


LLAMA_CPP = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook.weight": "selector_predecessor.weight",
    "candidate_selector.successor_codebook.weight": "selector_successor.weight",
}
LUCEBOX = {
    **LLAMA_CPP,
    "fc.weight": "dflash.fc.weight",
    "hidden_norm.weight": "dflash.hidden_norm.weight",
    "attention_conv.base_kernel": "attn_conv.base",
    "attention_conv.kernel_projection.weight": "attn_conv.proj.weight",
    "mlp_conv.base_kernel": "ffn_conv.base",
    "mlp_conv.kernel_projection.weight": "ffn_conv.proj.weight",
    "candidate_selector.hidden_projection.weight": "selector.hidden_proj.weight",
    "candidate_selector.predecessor_codebook.weight": "selector.pred_codebook",
    "candidate_selector.successor_codebook.weight": "selector.succ_codebook",
}
BEELLAMA = {
    **LLAMA_CPP,
    "fc.weight": "dflash_fc.weight",
    "hidden_norm.weight": "dflash_hidden_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
}
NAMES = {
    "dflash": LLAMA_CPP,
    "dflash-draft": BEELLAMA,
    "qwen35-dflash-draft": LUCEBOX,
    "gemma4-dflash-draft": LUCEBOX,
}


def gguf_metadata(toy: Toy, architecture: str) -> dict[str, object]:
    """Full keys and values as the architecture's converter writes them."""
    config = toy.config
    own = config["dflash_config"]
    slides = [kind == SLIDING for kind in config["layer_types"]]
    below: dict[str, object] = {
        "embedding_length": HIDDEN,
        "block_count": len(slides),
        "feed_forward_length": FFN,
        "context_length": 4096,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": EPS,
        "attention.sliding_window_pattern": slides,
        "rope.freq_base": THETA,
        **{name: own[name] for name in SECOND if name in own},
    }
    if architecture in {"dflash", "dflash-draft"}:
        below["attention.causal"] = config.get("is_causal", False)
    if architecture == "dflash":
        below |= {"block_size": BLOCK, "target_layers": [tap + 1 for tap in TAPS]}
        below |= {"attention.sliding_window": WINDOW}
        below |= {"rope.dimension_sections": [HEAD_DIM // 2, 0, 0, 0]}
    else:
        window = "dflash" if architecture.startswith("gemma4") else "attention"
        below |= {"dflash.block_size": BLOCK, "dflash.mask_token_id": own["mask_token_id"]}
        below |= {"dflash.target_layer_ids": list(TAPS), f"{window}.sliding_window": WINDOW}
        below |= {"dflash.n_target_layers": len(TAPS), "vocab_size": config["vocab_size"]}
    keys = {f"{architecture}.{name}": value for name, value in below.items()}
    if architecture == "dflash":
        keys["tokenizer.ggml.mask_token_id"] = own["mask_token_id"]
    return keys


def gguf_tensors(toy: Toy, architecture: str) -> Tensors:
    """Tensors under the names of the architecture's converter."""
    names, found = NAMES[architecture], {}
    for name, value in toy.tensors.items():
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            found[f"blk.{layer}.{names[part]}"] = value
        else:
            found[names[name]] = value
    return found


def write_gguf_drafter(
    path: Path,
    architecture: str,
    metadata: Mapping[str, object],
    tensors: Tensors,
    *,
    quantized: bool = False,
) -> Path:
    """Write a file; `quantized` stores matrices as Q8_0 where their rows allow it."""
    writer = GGUFWriter(path, architecture)
    adders = {
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        adders[type(value)](key, value)
    for name, value in tensors.items():
        is_matrix = value.dim() == 2 and value.shape[1] % 32 == 0
        kind = GGMLQuantizationType.Q8_0 if quantized and is_matrix else GGMLQuantizationType.F32
        array = value.contiguous().numpy().astype(np.float32)
        writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
