"""Toy models of every architecture: made with transformers, written as converters write GGUF files.

Random weights throughout, norms, gates, biases and decays away from 0 and 1, so that each matters.
Sizes are such that heads times their size is not the hidden size, and value heads outnumber key
heads threefold.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import transformers

VOCAB_SIZE = 96
HIDDEN_SIZE = 96
CONTEXT_TOKENS = 1024

Value = int | float | str | list[int] | list[bool]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One architecture at toy size.

    Attributes:
        architecture: GGUF's name of it.
        model_class: Of transformers.
        config: Its configuration, the sizes above aside.
        metadata: Of the file, below the architecture's name.
        names: Tensor names: a block's parts of transformers, or whole names, to those of GGUF.
        convert: Changes tensors of the file as converters do, in place.
        variant: Tells families of one architecture apart.
    """

    architecture: str
    model_class: str
    config: Mapping[str, object]
    metadata: Mapping[str, Value]
    names: Mapping[str, str]
    convert: Callable[[Tensors], None]
    variant: str = ""

    @property
    def name(self) -> str:
        """Of the family, unique."""
        return self.architecture + self.variant

    def build(self, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.nn.Module:
        """Make the model in transformers, float32, random from `seed`."""
        model_class = getattr(transformers, self.model_class)
        sizes: dict[str, object] = {
            **self.config,
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN_SIZE,
            "max_position_embeddings": CONTEXT_TOKENS,
        }
        if "vocab_size_per_layer_input" in sizes:
            sizes["vocab_size_per_layer_input"] = vocab_size
        config = model_class.config_class(attn_implementation="eager", **sizes)
        torch.manual_seed(seed)
        if hasattr(config, "num_experts"):
            config._experts_implementation = "eager"  # the others know no float64
        model = model_class(config).float().eval()
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            _randomise(name, values)
        return model

    def tensors(self, model: torch.nn.Module) -> Tensors:
        """Return what a converter writes of a model."""
        found: Tensors = {}
        tied = getattr(model.config, "tie_word_embeddings", False)
        for name, values in _saved(model):
            if name == "lm_head.weight" and tied:
                continue
            found[self._gguf_name(name)] = values.detach().clone()
        self.convert(found)
        return found

    def _gguf_name(self, name: str) -> str:
        whole = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
            "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
            "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
            "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
        }
        if name in whole:
            return whole[name]
        _, _, layer, part = name.split(".", 3)
        return f"blk.{layer}.{self.names[part]}"


def _saved(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.state_dict().items()


def _randomise(name: str, values: torch.Tensor) -> None:
    with torch.no_grad():
        if "inv_freq" in name or "embed_scale" in name:
            return
        if name.endswith("A_log"):
            values.uniform_(-4.0, -1.0)  # memory of many rows: of one alone, norms magnify noise
        elif name.endswith(("dt_bias", ".bias")):
            values.uniform_(-1.0, 1.0)
        elif name.endswith("layer_scalar"):
            values.uniform_(0.6, 1.4)
        elif name.endswith(("q_norm.weight", "k_norm.weight")) and values.mean() > 0.5:
            values.uniform_(0.3, 0.7)  # sharper attention only magnifies rounding
        elif "norm" in name:
            values.add_(torch.empty_like(values).uniform_(-0.5, 0.5))
        elif name.endswith("conv1d.weight"):
            values.normal_(std=0.4)
        elif "embed" in name or "lm_head" in name:
            values.normal_(std=0.06)  # logits of the size of 1, as rounding grows with them
        else:
            values.normal_(std=values.shape[-1] ** -0.5)


ATTENTION = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
}
HEAD_NORMS = {
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
FFN = {
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
PLAIN = {
    **ATTENTION,
    **FFN,
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
PLAIN_METADATA: dict[str, Value] = {
    "block_count": 3,
    "context_length": CONTEXT_TOKENS,
    "embedding_length": HIDDEN_SIZE,
    "feed_forward_length": 112,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10_000.0,
}
PLAIN_CONFIG: dict[str, object] = {
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}


def nothing(tensors: Tensors) -> None:
    """Converters leave these as they are."""


def pair_neighbours(tensors: Tensors) -> None:
    """Llama files: rows of Q and K such that dimension 2j pairs with 2j + 1."""
    for name, values in tensors.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            halves = values.view(-1, 2, 16, values.shape[1])
            tensors[name] = halves.transpose(1, 2).reshape(values.shape)


def fold_norms(tensors: Tensors) -> None:
    """Norm weights that transformers keeps as differences to 1."""
    for name, values in tensors.items():
        if name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            tensors[name] = values + 1


KEY_HEADS, VALUE_HEADS_EACH, VALUE_DIM = 2, 3, 16


def tile(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Order value heads so that head i belongs to key head i mod 2, not i div 3."""
    grouped = values.reshape(KEY_HEADS, VALUE_HEADS_EACH, head_dim, *values.shape[1:])
    return grouped.transpose(0, 1).reshape(values.shape)


def convert_deltanet(tensors: Tensors) -> None:
    """Qwen3.5 files: tiled value heads, folded norms, decay as `-exp(A)`."""
    fold_norms(tensors)
    keys = 2 * KEY_HEADS * 16
    for name, values in [*tensors.items()]:
        part = name.split(".", 2)[-1]
        if part == "attn_qkv.weight":
            tensors[name] = torch.cat((values[:keys], tile(values[keys:], VALUE_DIM)))
        elif part == "ssm_conv1d.weight":
            channels = values.squeeze(1)
            tensors[name] = torch.cat((channels[:keys], tile(channels[keys:], VALUE_DIM)))
        elif part == "attn_gate.weight":
            tensors[name] = tile(values, VALUE_DIM)
        elif part in {"ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias"}:
            tensors[name] = tile(values, 1)
        elif part == "ssm_a":
            tensors[name] = tile(-values.exp(), 1)
        elif part == "ssm_out.weight":
            tensors[name] = tile(values.t(), VALUE_DIM).t().contiguous()
    _split_experts(tensors)


def _split_experts(tensors: Tensors) -> None:
    """Mixtures: transformers keeps gate and up of all experts in one tensor; here they are two."""
    for name in [name for name in tensors if name.endswith("ffn_gate_up_exps.weight")]:
        gate, up = tensors.pop(name).chunk(2, dim=1)
        tensors[name.replace("gate_up", "gate")] = gate
        tensors[name.replace("gate_up", "up")] = up
    for name in [name for name in tensors if name.endswith("ffn_gate_inp_shexp.weight")]:
        tensors[name] = tensors[name].flatten()


DELTANET = {
    **ATTENTION,
    **HEAD_NORMS,
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
DELTANET_METADATA: dict[str, Value] = {
    "block_count": 4,
    "context_length": CONTEXT_TOKENS,
    "embedding_length": HIDDEN_SIZE,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "rope.freq_base": 10_000_000.0,
    "full_attention_interval": 4,
    "ssm.group_count": KEY_HEADS,
    "ssm.state_size": 16,
    "ssm.time_step_rank": KEY_HEADS * VALUE_HEADS_EACH,
    "ssm.inner_size": KEY_HEADS * VALUE_HEADS_EACH * VALUE_DIM,
    "ssm.conv_kernel": 4,
}
DELTANET_CONFIG: dict[str, object] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": KEY_HEADS * VALUE_HEADS_EACH,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": VALUE_DIM,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}

GEMMA = {
    **ATTENTION,
    **HEAD_NORMS,
    **FFN,
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
GEMMA_METADATA: dict[str, Value] = {
    "block_count": 7,
    "context_length": CONTEXT_TOKENS,
    "embedding_length": HIDDEN_SIZE,
    "feed_forward_length": 112,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 16,
}
GEMMA_CONFIG: dict[str, object] = {
    "intermediate_size": 112,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "sliding_window": 16,
}
GEMMA4_PATTERN = [True, True, True, True, False, True, False]
GEMMA4_LAYERS = ["sliding_attention" if local else "full_attention" for local in GEMMA4_PATTERN]
GEMMA4_SHARED = 2  # last layers that read the keys of earlier ones


GEMMA4 = {
    **GEMMA,
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}
GEMMA4_METADATA: dict[str, Value] = {
    **GEMMA_METADATA,
    "attention.sliding_window_pattern": GEMMA4_PATTERN,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 10_000.0,
    "final_logit_softcapping": 3.0,
}
GEMMA4_CONFIG: dict[str, object] = {
    **GEMMA_CONFIG,
    "global_head_dim": 64,
    "layer_types": GEMMA4_LAYERS,
    "final_logit_softcapping": 3.0,
}


def convert_gemma4(tensors: Tensors) -> None:
    """Gemma 4 files: which pairs rotate in layers that see all, as divisors."""
    tensors["rope_freqs.weight"] = torch.cat((torch.ones(8), torch.full((24,), 1e30)))


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", {**PLAIN_CONFIG, "head_dim": 32},
               {**PLAIN_METADATA, "attention.key_length": 32, "attention.value_length": 32,
                "rope.dimension_count": 32}, PLAIN, pair_neighbours),
        Family("qwen2", "Qwen2ForCausalLM", {**PLAIN_CONFIG, "hidden_act": "silu"}, PLAIN_METADATA,
               {**PLAIN, **{f"self_attn.{x}_proj.bias": f"attn_{x}.bias" for x in "qkv"}},
               nothing),
        Family("qwen3", "Qwen3ForCausalLM",
               {**PLAIN_CONFIG, "head_dim": 32, "tie_word_embeddings": True},
               {**PLAIN_METADATA, "attention.key_length": 32, "attention.value_length": 32},
               {**PLAIN, **HEAD_NORMS}, nothing),
        Family("qwen35", "Qwen3_5ForCausalLM", {**DELTANET_CONFIG, "intermediate_size": 112},
               {**DELTANET_METADATA, "feed_forward_length": 112}, {**DELTANET, **FFN},
               convert_deltanet),
        Family("qwen35moe", "Qwen3_5MoeForCausalLM",
               {**DELTANET_CONFIG, "num_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
               {**DELTANET_METADATA, "expert_count": 8, "expert_used_count": 2,
                "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
               {**DELTANET,
                "mlp.gate.weight": "ffn_gate_inp.weight",
                "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
                "mlp.experts.down_proj": "ffn_down_exps.weight",
                "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
                "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
                "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
                "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight"},
               convert_deltanet),
        Family("gemma3", "Gemma3ForCausalLM",
               {**GEMMA_CONFIG, "query_pre_attn_scalar": 32, "rope_parameters": {
                   "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                   "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
               {**GEMMA_METADATA, "attention.head_count_kv": 2, "attention.key_length": 32,
                "attention.value_length": 32, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0}, GEMMA, fold_norms),
        Family("gemma4", "Gemma4ForCausalLM",
               {**GEMMA4_CONFIG, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0},
               {**GEMMA4_METADATA, "embedding_length_per_layer_input": 0,
                "attention.head_count_kv": [2 if local else 1 for local in GEMMA4_PATTERN]},
               GEMMA4, convert_gemma4),
        Family("gemma4", "Gemma4ForCausalLM",
               {**GEMMA4_CONFIG, "hidden_size_per_layer_input": 32, "use_double_wide_mlp": True,
                "num_kv_shared_layers": GEMMA4_SHARED,
                "vocab_size_per_layer_input": VOCAB_SIZE},
               {**GEMMA4_METADATA, "attention.head_count_kv": 2,
                "attention.shared_kv_layers": GEMMA4_SHARED, "embedding_length_per_layer_input": 32,
                "feed_forward_length": [112] * 5 + [224] * GEMMA4_SHARED},
               GEMMA4, convert_gemma4, variant="-small"),
    )
}  # fmt: skip
