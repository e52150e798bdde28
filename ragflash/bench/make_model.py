"""Model files of a known shape with random weights, so that anyone can repeat figures of speed.

Every tensor has the size, the format and the place that it has in a real file. Quantised weights
are random blocks with constant scales, of mean 0 and standard deviation 0.02, so that the logits
are of ordinary size; texts mean nothing, and drafts are accepted by chance only.

Beside the engine's libraries nothing is imported, so that it also runs from a clone on a machine
that has only those.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray

from ragflash.bench.drafter_shape import DRAFTERS
from ragflash.errors import Conflict, ModelError, NotFound, SettingInvalid, StorageError
from ragflash.gguf.byte_level import BYTE_SYMBOLS
from ragflash.gguf.header import DEFAULT_ALIGNMENT_BYTES, MAX_HEADER_BYTES
from ragflash.gguf.reader import GGUFFile, TensorInfo
from ragflash.models.shapes import shape_file, shape_names

Progress = Callable[[str, int, int], None]

_F32, _Q4_K, _Q6_K = (GGMLQuantizationType[kind] for kind in ("F32", "Q4_K", "Q6_K"))

# Where the float16 scales of a block lie, and what they are. Everything else in it is random:
# Q4_K: (0…63) × (0…15) × 8e-5 - (0…63) × 6e-4; Q6_K: (-128…127) × (-32…31) × 1.46e-5.
_SCALES: Mapping[GGMLQuantizationType, tuple[int, NDArray[np.uint8]]] = {
    _Q4_K: (0, np.array([8e-5, 6e-4], "<f2").view(np.uint8)),
    _Q6_K: (208, np.array([1.46e-5], "<f2").view(np.uint8)),
}
# Range of the float32 tensors, by the end of their names.
_RANGES: Mapping[str, tuple[float, float]] = {
    "norm.weight": (1.0, 1.0),
    "ssm_a": (-0.52, -0.02),
    "ssm_dt.bias": (-1.0, 1.0),
    "ssm_conv1d.weight": (-0.5, 0.5),
}

_MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "a n", "o n", "Ġ a")
_END_OF_TEXT, _END_OF_TURN = "<|endoftext|>", "<|im_end|>"
_CONTROL_TOKENS = (_END_OF_TEXT, "<|im_start|>", _END_OF_TURN)

_PIECE_BYTES = 16 << 20
_MOST_THREADS = 8
_MB = 1_000_000


def make_model(
    name: str,
    out: Path,
    *,
    num_layers: int | None = None,
    mtp: bool = False,
    seed: int = 0,
    force: bool = False,
    progress: Progress = lambda *_: None,
) -> GGUFFile:
    """Write a model file of a shape that comes with ragflash.

    Args:
        name: Of the shape, one of `shape_names()`.
        out: Appears when it is complete. The same seed gives the same bytes.
        num_layers: The first ones only; all if left out.
        mtp: Add a block of multi-token prediction, and change nothing else.
        seed: At least 0.
        force: Replace a file that is there.
        progress: Is told the megabytes written, and all.

    Returns:
        Metadata and tensor table that the file was written from.

    Raises:
        NotFound: There is no such shape.
        SettingInvalid: The shape cannot have that number of layers.
        Conflict: `out` is there already.
        StorageError: The disk has too little room, or refused.
    """
    if name not in shape_names():
        raise NotFound(f"there is no shape {name!r}; known are {', '.join(shape_names())}")
    shape = variant(shape_file(name), num_layers=num_layers, mtp=mtp)
    write_model(shape, out, seed=seed, force=force, progress=progress)
    return shape


def make_drafter(
    name: str,
    out: Path,
    *,
    seed: int = 0,
    force: bool = False,
    progress: Progress = lambda *_: None,
) -> GGUFFile:
    """Write a DFlash drafter's file with random weights, 1.0 GB for a 27B model.

    Its drafts are never right but by chance; it is for measuring what they cost.

    Args:
        name: One of `DRAFTERS`: `dflash-qwen35-27b`, 5 layers of which 4 have a window, in Q4_K,
            for the shape `qwen35-27b`.
        out: See `make_model`.
        seed: At least 0.
        force: Replace a file that is there.
        progress: Is told the megabytes written, and all.

    Returns:
        Metadata and tensor table that the file was written from.

    Raises:
        NotFound: There is no such drafter.
        Conflict: `out` is there already.
        StorageError: The disk has too little room, or refused.
    """
    if name not in DRAFTERS:
        raise NotFound(f"there is no drafter {name!r}; known are {', '.join(DRAFTERS)}")
    shape = DRAFTERS[name].file(name)
    write_model(shape, out, seed=seed, force=force, progress=progress)
    return shape


def variant(shape: GGUFFile, *, num_layers: int | None = None, mtp: bool = False) -> GGUFFile:
    """Return a shape with fewer layers or with a block of multi-token prediction.

    The formats are those that llama.cpp's Q4_K_M gives to so many layers.

    Raises:
        SettingInvalid: The number of layers is no multiple of the pattern's, or too large.
    """
    prefix = shape.require("general.architecture", str)
    most = shape.require(f"{prefix}.block_count", int)
    interval = shape.require(f"{prefix}.full_attention_interval", int)
    kept = most if num_layers is None else num_layers
    if kept % interval or not 0 < kept <= most:
        raise SettingInvalid(
            f"{kept} layers: {shape.path.name} has a multiple of {interval} up to {most}"
        )
    tensors = [
        tensor if layer is None else _mixed(tensor, layer, kept)
        for tensor in shape.tensors.values()
        if (layer := _layer_of(tensor.name)) is None or layer < kept
    ]
    metadata = {**shape.metadata, f"{prefix}.block_count": kept + mtp}
    if mtp:
        tensors += _mtp_block(tensors, kept, shape.require(f"{prefix}.embedding_length", int))
        metadata[f"{prefix}.nextn_predict_layers"] = 1
    return GGUFFile(shape.paths, [], metadata, {tensor.name: tensor for tensor in tensors})


def write_model(
    shape: GGUFFile, out: Path, *, seed: int, force: bool = False, progress: Progress
) -> None:
    """Write a file of a shape, which may have tensors in F32, Q4_K and Q6_K; see `make_model`.

    Raises:
        ModelError: No random values are known for one of the tensors.
    """
    if out.is_dir() or (out.exists() and not force):
        raise Conflict(f"{out} exists already; --force replaces a file")
    pieces = list(_pieces(shape, seed))
    num_bytes = pieces[-1].end_bytes
    unfinished = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _require_room(out, num_bytes + MAX_HEADER_BYTES)
        try:
            start = _write_header(shape, unfinished, seed)
            os.truncate(unfinished, start + num_bytes)
            write = partial(_write_piece, unfinished, start)
            with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
                done = 0
                for written in pool.map(write, pieces):
                    done += written
                    progress(f"{out.name} (MB)", done // _MB, num_bytes // _MB)
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error}") from error


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("blk.") else None


def _mixed(tensor: TensorInfo, layer: int, num_layers: int) -> TensorInfo:
    """Give the tensors that Q4_K_M mixes formats in the one of their layer.

    `llama_tensor_get_type_impl` of llama.cpp: six bits in the first and last eighth and in every
    third layer between.
    """
    part = tensor.name.split(".")[2]
    if part not in {"attn_qkv", "attn_v", "ffn_down"}:
        return tensor
    eighth = num_layers // 8
    is_outer = layer < eighth or layer >= 7 * num_layers // 8
    is_better = is_outer or (layer - eighth) % 3 == 2
    return _tensor(tensor.name, tensor.shape, _Q6_K if is_better else _Q4_K)


def _mtp_block(tensors: list[TensorInfo], num_layers: int, hidden_size: int) -> list[TensorInfo]:
    """Return the block after the last layer, which is one of attention like it."""
    last, own = f"blk.{num_layers - 1}.", f"blk.{num_layers}."
    return [
        *(
            replace(tensor, name=own + tensor.name.removeprefix(last))
            for tensor in tensors
            if tensor.name.startswith(last)
        ),
        _tensor(f"{own}nextn.eh_proj.weight", (hidden_size, 2 * hidden_size), _Q4_K),
        *(
            _tensor(f"{own}nextn.{norm}.weight", (hidden_size,), _F32)
            for norm in ("enorm", "hnorm", "shared_head_norm")
        ),
    ]


def _tensor(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> TensorInfo:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    return TensorInfo(name, shape, kind, 0, prod(shape) // block_values * block_bytes)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole blocks of one tensor, `offset_bytes` from the start of all tensors' data."""

    tensor: TensorInfo
    offset_bytes: int
    num_bytes: int
    seeds: tuple[int, int, int]

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.num_bytes


def _pieces(shape: GGUFFile, seed: int) -> Iterator[_Piece]:
    offset = 0
    for index, tensor in enumerate(shape.tensors.values()):
        _require_known(tensor)
        block_bytes = GGML_QUANT_SIZES[tensor.type][1]
        most_bytes = _PIECE_BYTES // block_bytes * block_bytes
        for number, start in enumerate(range(0, tensor.num_bytes, most_bytes)):
            num_bytes = min(most_bytes, tensor.num_bytes - start)
            yield _Piece(tensor, offset + start, num_bytes, (seed, index, number))
        offset += GGUFWriter.ggml_pad(tensor.num_bytes, DEFAULT_ALIGNMENT_BYTES)


def _require_known(tensor: TensorInfo) -> None:
    if tensor.type not in _SCALES and (tensor.type != _F32 or _range_of(tensor.name) is None):
        raise ModelError(f"no random values are known for {tensor.name} ({tensor.type.name})")


def _range_of(name: str) -> tuple[float, float] | None:
    return next((limits for end, limits in _RANGES.items() if name.endswith(end)), None)


def _write_piece(path: Path, start: int, piece: _Piece) -> int:
    with path.open("r+b") as file:
        file.seek(start + piece.offset_bytes)
        return file.write(_random_values(piece).data)


def _random_values(piece: _Piece) -> NDArray[np.uint8]:
    # Raw words: numpy promises that these stay the same in later versions.
    source = np.random.PCG64(np.random.SeedSequence(piece.seeds))
    limits = _range_of(piece.tensor.name) if piece.tensor.type == _F32 else None
    if limits is not None:
        low, high = limits
        fractions = (source.random_raw(piece.num_bytes // 4) >> np.uint64(11)) * 2.0**-53
        return (low + (high - low) * fractions).astype("<f4").view(np.uint8)
    words = source.random_raw(-(-piece.num_bytes // 8)).astype("<u8", copy=False)
    stored: NDArray[np.uint8] = words.view(np.uint8)[: piece.num_bytes]
    at, scales = _SCALES[piece.tensor.type]
    blocks = stored.reshape(-1, GGML_QUANT_SIZES[piece.tensor.type][1])
    blocks[:, at : at + len(scales)] = scales
    return stored


def _require_room(out: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise StorageError(
            f"{out} takes {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there"
        )


def _write_header(shape: GGUFFile, path: Path, seed: int) -> int:
    """Write all but the values; return where these begin."""
    writer = GGUFWriter(path, shape.require("general.architecture", str))
    metadata = {
        **shape.metadata,
        "general.name": f"{shape.path.name}, random weights, seed {seed}",
    }
    del metadata["general.architecture"]  # the writer has said it
    for key, value in metadata.items():
        if isinstance(value, tuple):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_file_type(15)  # mostly Q4_K, medium
    writer.add_quantization_version(2)
    if "token_embd.weight" in shape.tensors:  # a drafter has none of its own
        _add_tokenizer(writer, shape.tensors["token_embd.weight"].shape[0])
    for tensor in shape.tensors.values():
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype("<f4"), tensor.num_bytes, raw_dtype=tensor.type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return GGUFWriter.ggml_pad(path.stat().st_size, DEFAULT_ALIGNMENT_BYTES)


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """A token a byte, a few merges, the turns of ChatML, and what nobody uses."""
    text = (*BYTE_SYMBOLS, *(merge.replace(" ", "") for merge in _MERGES))
    tokens = [*text, *_CONTROL_TOKENS]
    kinds = [TokenType.NORMAL] * len(text) + [TokenType.CONTROL] * len(_CONTROL_TOKENS)
    num_unused = vocab_size - len(tokens)
    assert num_unused >= 0
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens + [f"[PAD{number}]" for number in range(num_unused)])
    writer.add_token_types([*kinds, *[TokenType.UNUSED] * num_unused])
    writer.add_token_merges(_MERGES)
    writer.add_eos_token_id(tokens.index(_END_OF_TURN))
    writer.add_pad_token_id(tokens.index(_END_OF_TEXT))
    writer.add_add_bos_token(False)
