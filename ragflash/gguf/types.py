"""Which GGML block formats ragflash reads, and how the enum of the format names them."""

from collections.abc import Mapping
from types import MappingProxyType

from gguf import GGMLQuantizationType

from ragflash.errors import UnsupportedTensorType
from ragflash.gguf.header import TensorInfo
from ragflash_kernels.quant_layout import BLOCK_FORMATS, BlockFormat

READABLE_FORMATS: Mapping[GGMLQuantizationType, BlockFormat] = MappingProxyType(
    {GGMLQuantizationType[name]: block_format for name, block_format in BLOCK_FORMATS.items()}
)


def block_format_of(tensor: TensorInfo) -> BlockFormat:
    """The format that a tensor is read with.

    Raises:
        UnsupportedTensorType: No kernel unpacks its type.
    """
    block_format = READABLE_FORMATS.get(tensor.type)
    if block_format is None:
        raise UnsupportedTensorType(
            f"tensor {tensor.name!r}",
            tensor.offset_bytes,
            f"is stored as {tensor.type.name}; ragflash reads {', '.join(BLOCK_FORMATS)}",
        )
    return block_format
