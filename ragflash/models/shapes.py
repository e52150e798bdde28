"""Sizes of models, from a file's header or from tables that come with ragflash."""

import json
from collections import defaultdict
from collections.abc import Iterable
from importlib import resources
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ragflash.gguf.reader import GGUFFile, TensorInfo
from ragflash.kvcache.planner import ModelShape
from ragflash.models.metadata import Metadata
from ragflash.models.registry import model_class
from ragflash_kernels.qmatmul.formats import COLUMNS_PER_STEP, RECORD_FORMATS, ROWS_PER_RECORD

_EMBEDDING = "token_embd.weight"
_TABLES_BY_ROW = (_EMBEDDING, "per_layer_token_embd.weight", ".nextn.embed_tokens.weight")
# What matrices multiply, where several multiply the same.
_INPUTS = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate"), "mixer"),
    **dict.fromkeys(("ssm_alpha", "ssm_beta"), "mixer"),
    **dict.fromkeys(("ffn_gate", "ffn_up"), "ffn"),
}
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
    by_row = [name for name in file.tensors if name.endswith(_TABLES_BY_ROW)]
    is_tied = "output.weight" not in file.tensors
    on_device = [
        tensor
        for name, tensor in file.tensors.items()
        if name not in by_row or (is_tied and name == _EMBEDDING)  # the head reads it whole
    ]
    groups = _groups(on_device)
    return ModelShape(
        name=file.path.name,
        context_tokens=sequence.context_tokens,
        kv_layers=sequence.kv_layers,
        state_bytes=sequence.state_bytes,
        tape_bytes=sequence.tape_bytes,
        file_bytes=sum(tensor.num_bytes for tensor in file.tensors.values()),
        device_weight_bytes=sum(map(device_bytes, on_device)),
        host_weight_bytes=sum(file.tensors[name].num_bytes for name in by_row),
        largest_group_values=max(
            (sum(prod(tensor.shape) for tensor in group) for group in groups), default=0
        ),
        widest_group=max((sum(tensor.shape[0] for tensor in group) for group in groups), default=0),
        query_values=max(
            (t.shape[-1] for t in on_device if t.name.endswith(".attn_output.weight")), default=0
        ),
        hidden_size=metadata.size("embedding_length"),
        vocab_size=metadata.vocab_size(),
        has_mtp=metadata.count("nextn_predict_layers") > 0,
    )


def device_bytes(tensor: TensorInfo) -> int:
    """Return what a tensor takes on a card, where matrices lie in records.

    Formats that have no record are unpacked to two bytes a value; vectors and experts stay as they
    are stored.
    """
    if len(tensor.shape) != 2 or tensor.type.name == "F32":
        return tensor.num_bytes
    layout = RECORD_FORMATS.get(tensor.type.name)
    if layout is None:
        return 2 * prod(tensor.shape)
    rows, columns = tensor.shape
    steps = layout.steps(columns)
    tiles, records = -(-rows // ROWS_PER_RECORD), -(-columns // (COLUMNS_PER_STEP * steps))
    return tiles * records * layout.offsets(steps).size


def _groups(tensors: Iterable[TensorInfo]) -> list[list[TensorInfo]]:
    """Matrices of one block that share an input, and so are unpacked together."""
    groups: defaultdict[tuple[str, str], list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        name, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        if name.startswith("blk.") and len(tensor.shape) == 2:
            groups[name, _INPUTS.get(part, part)].append(tensor)
    return list(groups.values())


def _tensor(name: str, kind: str, *dimensions: int) -> TensorInfo:
    block_format = GGMLQuantizationType[kind]
    block_values, block_bytes = GGML_QUANT_SIZES[block_format]
    num_bytes = prod(dimensions) // block_values * block_bytes
    return TensorInfo(name, dimensions[::-1], block_format, 0, num_bytes)
