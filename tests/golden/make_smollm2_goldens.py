"""Write `smollm2_logits.json`: what transformers computes with the weights of the packaged model.

    python tests/golden/make_smollm2_goldens.py

Weights are unpacked by the `gguf` package and put into `LlamaForCausalLM` in float32, so that no
arithmetic is shared with ragflash. Greedy tokens are stored only if no runner-up was near, as ties
would make the test one of rounding.
"""

import json
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, quants
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ragflash.gguf.packaged import packaged_model_path
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
NUM_TEXT_TOKENS = 200
NUM_GREEDY_TOKENS = 64
NUM_TOP = 20
MIN_MARGIN = 1e-3
# "What is the capital of France?" with the system turn that the model's template inserts.
QUESTION_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520),
    *(9531, 198),
]
WHOLE_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    if name in WHOLE_MODEL_NAMES:
        return WHOLE_MODEL_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that GGUF llama files give to Q and K."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def load_transformers_llama(path: Path) -> LlamaForCausalLM:
    """The model of a GGUF llama file as transformers runs it, in float32."""
    reader = GGUFReader(path)

    def value(key: str, default: int | None = None):
        field = reader.fields.get(f"llama.{key}")
        return field.contents() if field or default is None else default

    num_heads, num_kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    state = {}
    for tensor in reader.tensors:
        weight = quants.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weight = split_halves(weight, num_heads)
        if ".attn_k." in tensor.name:
            weight = split_halves(weight, num_kv_heads)
        state[hf_name(tensor.name)] = torch.from_numpy(np.array(weight, np.float32))
    tied = "lm_head.weight" not in state
    config = LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=value("attention.key_length", value("embedding_length") // num_heads),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=tied,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if tied else set())
    model.tie_weights()
    return model


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    config = GenerationConfig(
        max_new_tokens=NUM_GREEDY_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    result = model.generate(torch.tensor([prompt]), generation_config=config)
    top = torch.cat(result.logits).topk(2).values
    margin = (top[:, 0] - top[:, 1]).min().item()
    assert margin > MIN_MARGIN, f"a runner-up is {margin} away"
    tokens = result.sequences[0, len(prompt) :].tolist()
    assert len(tokens) == NUM_GREEDY_TOKENS
    return tokens


def write_goldens(
    name: str, path: Path, model: PreTrainedModel, ids: list[int], prompts: list[list[int]]
) -> None:
    """Write what a model computes for a text, and how it goes on after prompts."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        top = logits.topk(NUM_TOP)
        golden = {
            "model": path.name,
            "ids": ids,
            "top_ids": top.indices.tolist(),
            "top_logits": [[round(x, 5) for x in row] for row in top.values.tolist()],
            "logsumexp": [round(x, 5) for x in logits.logsumexp(-1).tolist()],
            "greedy": [{"prompt": p, "tokens": greedy(model, p)} for p in prompts],
        }
    out = Path(__file__).with_name(name)
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    path = packaged_model_path()
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    text = (ROOT / "ragflash" / "samples" / "bug-reporting.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)[:NUM_TEXT_TOKENS]
    model = load_transformers_llama(path)
    write_goldens("smollm2_logits.json", path, model, ids, [QUESTION_IDS, ids[:100]])


if __name__ == "__main__":
    main()
