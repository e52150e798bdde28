"""GGUF architecture `qwen3`: Qwen3, dense (arXiv:2505.09388)."""

from ragflash.models.plain import PlainDecoder


class Qwen3(PlainDecoder):
    """A qwen3 file: heads of Q and K are normalised, and their size is not hidden ÷ heads."""

    has_head_norms = True
