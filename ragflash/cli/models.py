"""Model files by path or name, and what their headers say."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from ragflash.errors import ModelMissing
from ragflash.gguf.packaged import packaged_model_path
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.formats import KV_FORMATS
from ragflash.kvcache.planner import DrafterShape, ModelShape, kv_bytes
from ragflash.models.dflash.shape import drafter_shape
from ragflash.models.shapes import model_shape, shape_file, shape_names
from ragflash.models.weights import weight_format

__all__ = ["describe", "installed", "named", "named_shape", "shape_of_drafter"]


def installed(folder: Path) -> Iterator[Path]:
    """Yield the packaged model, if it is there, and files below `folder`, one of split ones."""
    packaged = packaged_model_path()
    if packaged is not None:
        yield packaged
    for path in sorted(folder.rglob("*.gguf")):
        is_later_part = "-of-" in path.name and "-00001-of-" not in path.name
        if not is_later_part:
            yield path


def named(name: str) -> Path:
    """Return a model file's path; raises `ModelMissing` for what is none."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    shapes = ", ".join(shape_names())
    raise ModelMissing(f"there is no file {name!r}; shapes that plan knows by name: {shapes}")


def named_shape(name: str) -> ModelShape:
    """Return the sizes of a model file, or of a shape that comes with ragflash."""
    if name in shape_names():
        return model_shape(shape_file(name))
    with GGUFFile.open(named(name)) as file:
        return model_shape(file)


def shape_of_drafter(path: Path | None) -> DrafterShape | None:
    """Return the sizes of a drafter's file, `None` of none."""
    return None if path is None else drafter_shape(named(str(path)))


def describe(path: Path) -> dict[str, Any]:
    """Say what a model file is, from its header.

    Raises:
        ModelError: It cannot be run; the subclass and the text say why.
    """
    with GGUFFile.open(path) as file:
        shape = model_shape(file)
        return {
            "path": str(path),
            "architecture": file.require("general.architecture", str),
            "name": file.get("general.name", str) or "",
            "bytes": sum(part.stat().st_size for part in file.paths),
            "parts": len(file.paths),
            "parameters": sum(prod(tensor.shape) for tensor in file.tensors.values()),
            "weights": weight_format(file),
            "context_tokens": shape.context_tokens,
            "vocabulary": shape.vocab_size,
            "tokenizer": file.get("tokenizer.ggml.pre", str)
            or file.get("tokenizer.ggml.model", str)
            or "none",
            "chat_template": bool(file.get("tokenizer.chat_template", str)),
            "state_bytes": shape.state_bytes,
            "kv_bytes_a_token": {name: kv_bytes(shape, 1, name) for name in KV_FORMATS},
        }
