"""Byte-level BPE (`tokenizer.ggml.model = gpt2`): a vocabulary with a character for each byte."""

import numpy as np
from gguf import TokenType
from tokenizers import Tokenizer as Segmenter
from tokenizers.models import BPE

from ragflash.errors import GGUFInvalid
from ragflash.gguf.pre_tokenizer import PreTokenizerRecipe
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.vocabulary import (
    HIDDEN_TYPES,
    PREFIX,
    Merge,
    Spelling,
    Vocabulary,
    parse_merges,
    take_whole,
)
from ragflash.gguf.word_cuts import may_cut


def _byte_symbols() -> list[str]:
    """The character that stands for each byte (GPT-2's mapping)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_SYMBOLS = _byte_symbols()
BYTE_OF_SYMBOL = {ord(symbol): byte for byte, symbol in enumerate(BYTE_SYMBOLS)}


def byte_level_spelling(
    file: GGUFFile, vocabulary: Vocabulary, recipe: PreTokenizerRecipe
) -> Spelling:
    """Build the segmenter from the file's merges and a recipe for words.

    Raises:
        GGUFInvalid: Text would be lost, or a merge names no text token.
    """
    text = {**vocabulary.merged, **vocabulary.bytes}
    merges = parse_merges(file)
    _check(text, merges)
    model = BPE({**text, **vocabulary.atoms}, merges, ignore_merges=recipe.ignore_merges)
    segmenter = Segmenter(model)
    segmenter.pre_tokenizer = recipe.build()
    take_whole(segmenter, vocabulary.atoms)
    return Spelling(
        segmenter,
        [_bytes(*token) for token in zip(vocabulary.tokens, vocabulary.types, strict=True)],
        np.array([symbol in text for symbol in BYTE_SYMBOLS]),
        recipe.add_bos,
        is_by_words=may_cut(vocabulary.atoms),
    )


def _check(text: dict[str, int], merges: list[Merge]) -> None:
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in text:
                raise GGUFInvalid(
                    f"{PREFIX}merges", 0, f"{left!r} {right!r}: {token!r} is no text token"
                )
    for byte in (*range(0x20, 0x7F), 0x0A):
        if BYTE_SYMBOLS[byte] not in text:
            raise GGUFInvalid(f"{PREFIX}tokens", 0, f"no token for the byte 0x{byte:02X}")


def _bytes(token: str, kind: int) -> bytes:
    """User-defined tokens are spelled as they are, all others a character per byte."""
    if kind in HIDDEN_TYPES:
        return b""
    if kind != TokenType.USER_DEFINED:
        spelled = token.translate(BYTE_OF_SYMBOL)
        if all(ord(symbol) < 256 for symbol in spelled):
            return spelled.encode("latin-1")
    return token.encode()
