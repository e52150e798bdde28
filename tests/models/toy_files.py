"""Writes toy model files from metadata and tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:  # transformers takes seconds to import
    from tests.models.families import Family, Tensors, Value

TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*sorted(ByteLevel.alphabet()), "er", *TURNS)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: "Mapping[str, Value]",
    tensors: "Tensors",
    *,
    quantized: bool = False,
    tokenizer: bool = False,
) -> Path:
    """Write a model file; `quantized` stores matrices as Q8_0.

    With `tokenizer` it has one of `TOKENS`: a token a byte, one merge, and the turns of ChatML.
    """
    writer = GGUFWriter(path, architecture)
    if tokenizer:
        _add_tokenizer(writer)
    adders = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        adders[type(value)](f"{architecture}.{key}", value)
    for name, values in tensors.items():
        array = values.float().contiguous().numpy()
        is_matrix = array.ndim >= 2 and array.shape[-1] % 32 == 0
        kind = GGMLQuantizationType.Q8_0 if quantized and is_matrix else GGMLQuantizationType.F32
        writer.add_tensor(name, quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_toy(path: Path, family: "Family", seed: int = 1, **metadata: "Value") -> Path:
    """Write a family's toy model with a tokenizer; `metadata` takes the place of the family's."""
    tensors = family.tensors(family.build(seed, vocab_size=len(TOKENS)))
    told = {**family.metadata, **metadata}
    return write_gguf(path, family.architecture, told, tensors, tokenizer=True)


def _add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(TOKENS))
    kinds = [TokenType.CONTROL if token in TURNS else TokenType.NORMAL for token in TOKENS]
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(["e r"])
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_add_bos_token(False)
