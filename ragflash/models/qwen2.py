"""GGUF architecture `qwen2`: Qwen2 and Qwen2.5, dense (arXiv:2407.10671, arXiv:2412.15115)."""

from ragflash.models.plain import PlainDecoder


class Qwen2(PlainDecoder):
    """A qwen2 file: Q, K and V have biases."""

    has_qkv_bias = True
