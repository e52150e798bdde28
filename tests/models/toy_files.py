"""Writes toy model files from metadata and tensors."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from tests.models.families import Tensors, Value


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Value],
    tensors: Tensors,
    *,
    quantized: bool = False,
) -> Path:
    """Write a model file without a tokenizer; `quantized` stores matrices as Q8_0."""
    writer = GGUFWriter(path, architecture)
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
