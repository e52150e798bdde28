"""Sizes of models, from a file's header or from tables that come with ragflash."""

import json
from importlib import resources
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ragflash.gguf.reader import GGUFFile, TensorInfo
from ragflash.kvcache.planner import ModelShape
from ragflash.models.metadata import Metadata
from ragflash.models.registry import model_class

_TABLES = resources.files("ragflash.models") / "shapes"


def shape_names() -> tuple[str, ...]:
    """Name the shapes that come with ragflash."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _TABLES.iterdir()))


def shape_file(name: str) -> GGUFFile:
    """Return metadata and tensor table of a shape that comes with ragflash, without data."""
    table = json.loads((_TABLES / f"{name}.json").read_text(encoding="utf-8"))
    tensors = {key: _tensor(key, *entry) for key, entry in table["tensors"].items()}
    metadata = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in table["metadata"].items()
    }
    return GGUFFile([Path(name)], [], metadata, tensors)


def model_shape(file: GGUFFile) -> ModelShape:
    """Read a model's size from its header.

    Raises:
        ModelError: The file cannot be run; the subclass and the text say why.
    """
    metadata = Metadata(file)
    sequence = model_class(metadata.architecture).shape(file)
    by_row = {"per_layer_token_embd.weight"}
    if "output.weight" in file.tensors:
        by_row.add("token_embd.weight")  # else it is the head too, and read whole
    on_device = [tensor for name, tensor in file.tensors.items() if name not in by_row]
    return ModelShape(
        name=file.path.name,
        context_tokens=sequence.context_tokens,
        kv_layers=sequence.kv_layers,
        state_bytes=sequence.state_bytes,
        tape_bytes=sequence.tape_bytes,
        device_weight_bytes=sum(tensor.num_bytes for tensor in on_device),
        host_weight_bytes=sum(file.tensors[n].num_bytes for n in by_row if n in file.tensors),
        largest_matrix_values=max(
            (prod(t.shape[-2:]) for t in on_device if t.name.startswith("blk.")), default=0
        ),
        hidden_size=metadata.size("embedding_length"),
        vocab_size=metadata.vocab_size(),
    )


def _tensor(name: str, kind: str, *dimensions: int) -> TensorInfo:
    block_format = GGMLQuantizationType[kind]
    block_values, block_bytes = GGML_QUANT_SIZES[block_format]
    num_bytes = prod(dimensions) // block_values * block_bytes
    return TensorInfo(name, dimensions[::-1], block_format, 0, num_bytes)
