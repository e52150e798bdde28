"""Which GGML block formats ragflash reads, and how the enum of the format names them."""

from collections.abc import Mapping
from types import MappingProxyType

from gguf import GGMLQuantizationType

from ragflash.errors import UnsupportedTensorType
from ragflash_kernels.quant_layout import BLOCK_FORMATS, BlockFormat

READABLE_FORMATS: Mapping[GGMLQuantizationType, BlockFormat] = MappingProxyType(
    {GGMLQuantizationType[name]: block_format for name, block_format in BLOCK_FORMATS.items()}
)


def block_format_of(tensor_name: str, tensor_type: GGMLQuantizationType) -> BlockFormat:
    """The format that `tensor_type` is read with.

    Raises:
        UnsupportedTensorType: No kernel unpacks it.
    """
    block_format = READABLE_FORMATS.get(tensor_type)
    if block_format is None:
        known = ", ".join(BLOCK_FORMATS)
        raise UnsupportedTensorType(
            f"tensor {tensor_name!r} is stored as {tensor_type.name}; ragflash reads {known}"
        )
    return block_format
