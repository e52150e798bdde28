"""GGUF architecture `llama`: Llama 1 to 3, SmolLM2, and what else shares their blocks.

(Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288.)
"""

from ragflash.models.plain import PlainDecoder


class Llama(PlainDecoder):
    """A llama file, whose rows of Q and K are in the order that pairs neighbours."""

    pairs_neighbours = True
