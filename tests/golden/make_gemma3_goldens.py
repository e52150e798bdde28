"""Write `gemma3_logits.json`: what transformers computes with the weights of Gemma 3 270M.

    python -m tests.golden.make_gemma3_goldens FOLDER

FOLDER keeps the assembled model file. As for SmolLM2, the `gguf` package unpacks the weights.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, quants
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from tests.gemma import assembled_gemma_path
from tests.golden.make_smollm2_goldens import NUM_TEXT_TOKENS, ROOT, write_goldens

BOS = 2
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_name(name: str) -> str:
    whole = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}
    if name in whole:
        return f"model.{whole[name]}.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def load_transformers_gemma3(path: Path) -> Gemma3ForCausalLM:
    """The model of a GGUF gemma3 file as transformers runs it, in float32."""
    reader = GGUFReader(path)

    def value(key: str):
        return reader.fields[f"gemma3.{key}"].contents()

    state = {}
    for tensor in reader.tensors:
        weight = np.array(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name.endswith("norm.weight"):
            weight -= 1  # transformers adds it again
        state[hf_name(tensor.name)] = torch.from_numpy(weight)
    head_dim = value("attention.key_length")
    config = Gemma3TextConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        sliding_window=value("attention.sliding_window"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": value("rope.freq_base")},
        },
        tie_word_embeddings=True,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = Gemma3ForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def main() -> None:
    path = assembled_gemma_path(Path(sys.argv[1]))
    assert path is not None, "install the extra `gemma`"
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    text = (ROOT / "ragflash" / "samples" / "bug-reporting.txt").read_text(encoding="utf-8")
    # The window of its local layers is 512 tokens: the text must be longer.
    ids = [BOS, *tokenizer.encode(text)][: 3 * NUM_TEXT_TOKENS]
    france = [BOS, *tokenizer.encode("The capital of France is")]
    write_goldens(
        "gemma3_logits.json", path, load_transformers_gemma3(path), ids, [france, ids[:100]]
    )


if __name__ == "__main__":
    main()
