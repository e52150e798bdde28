"""A toy llama with random weights, with every detail that a mistake could hide in."""

from pathlib import Path

import numpy as np
import torch

from tests.models.toy_files import write_gguf

VOCAB_SIZE = 96
HIDDEN_SIZE = 96
FFN_SIZE = 160
NUM_LAYERS = 3
NUM_HEADS = 6
NUM_KV_HEADS = 2
HEAD_DIM = 32


METADATA: dict[str, int | float | str] = {
    "block_count": NUM_LAYERS,
    "context_length": 2048,
    "embedding_length": HIDDEN_SIZE,
    "feed_forward_length": FFN_SIZE,
    "attention.head_count": NUM_HEADS,
    "attention.head_count_kv": NUM_KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": 10_000.0,
}
LAYER_MATRICES = (  # name, rows, columns, standard deviation
    ("attn_q", NUM_HEADS * HEAD_DIM, HIDDEN_SIZE, 0.15),
    ("attn_k", NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE, 0.15),
    ("attn_v", NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE, 0.2),
    ("attn_output", HIDDEN_SIZE, NUM_HEADS * HEAD_DIM, 0.2),
    ("ffn_gate", FFN_SIZE, HIDDEN_SIZE, 0.15),
    ("ffn_up", FFN_SIZE, HIDDEN_SIZE, 0.15),
    ("ffn_down", HIDDEN_SIZE, FFN_SIZE, 0.15),
)


def write_tiny_llama(
    path: Path,
    seed: int,
    *,
    tied: bool = False,
    quantized: bool = False,
    rope_freqs: bool = False,
    extra_tensors: tuple[str, ...] = (),
    overrides: dict[str, int | float | str] | None = None,
) -> Path:
    """Write a llama of 3 layers, 6 query and 2 key heads of 32, hidden 96; no tokenizer.

    Query heads are wider together than the hidden size, and norms are away from 1. `quantized`
    stores matrices as Q8_0. `overrides` replaces metadata below `llama.`.
    """
    rng = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add_matrix(name: str, rows: int, columns: int, deviation: float) -> None:
        values = rng.standard_normal((rows, columns)) * deviation
        tensors[f"{name}.weight"] = torch.from_numpy(values.astype(np.float32))

    def add_vector(name: str, low: float, high: float, size: int = HIDDEN_SIZE) -> None:
        values = rng.uniform(low, high, size)
        tensors[f"{name}.weight"] = torch.from_numpy(values.astype(np.float32))

    add_matrix("token_embd", VOCAB_SIZE, HIDDEN_SIZE, 0.3)
    for layer in range(NUM_LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            add_vector(f"blk.{layer}.{norm}", 0.5, 1.5)
        for name, rows, columns, deviation in LAYER_MATRICES:
            add_matrix(f"blk.{layer}.{name}", rows, columns, deviation)
    add_vector("output_norm", 0.5, 1.5)
    if not tied:
        add_matrix("output", VOCAB_SIZE, HIDDEN_SIZE, 0.3)
    if rope_freqs:
        add_vector("rope_freqs", 1.0, 8.0, HEAD_DIM // 2)
    tensors |= {name: torch.zeros(HIDDEN_SIZE) for name in extra_tensors}
    metadata = {**METADATA, **(overrides or {})}
    return write_gguf(path, "llama", metadata, tensors, quantized=quantized)
