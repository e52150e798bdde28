"""What a drafter takes of a card, from its file's header."""

from math import prod
from pathlib import Path

from ragflash.errors import ModelError
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.planner import DrafterShape
from ragflash.models.dflash.config import Given
from ragflash.models.dflash.gguf_config import config_from_gguf
from ragflash.models.dflash.load import CONFIG
from ragflash.models.dflash.paged_ring import ring_bytes
from ragflash.models.dflash.weights import GGUF_NAMES
from ragflash.models.shapes import device_bytes


def drafter_shape(path: Path, given: Given | None = None) -> DrafterShape:
    """Read a drafter's size.

    Raises:
        ModelError: It cannot be used, or not by a card; the text says why.
    """
    if (path / CONFIG).is_file():
        raise ModelError(
            f"a card drafts from a GGUF file: convert the safetensors in {path} to one"
        )
    with GGUFFile.open(path) as file:
        return shape_of(file, given)


def shape_of(file: GGUFFile, given: Given | None = None) -> DrafterShape:
    """Read the size of a drafter whose file is open.

    Raises:
        ModelError: It cannot be used; the text says why.
    """
    config, tensors = config_from_gguf(file, given or Given()), file.tensors
    joined = (prod(tensors[name].shape) for name in GGUF_NAMES["features"] if name in tensors)
    return DrafterShape(
        weight_bytes=sum(map(device_bytes, tensors.values())),
        ring_bytes=ring_bytes(config),
        tap_layers=config.tap_layers,
        largest_values=max(joined, default=0),
        block_rows=config.block_size,
    )
