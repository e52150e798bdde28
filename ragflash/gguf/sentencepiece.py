"""Vocabularies in the manner of SentencePiece: characters, blanks as `▁`, spare bytes as `<0xFF>`.

`tokenizer.ggml.model = llama` (Gemma 3 and older) has scores: of all neighbours that together
spell a token, those with the best-scored token merge first (SentencePiece, `bpe_model.cc`). Each
way to cut a token in two is therefore a merge, and the scores put them in order. `gemma4` lists
its merges. Both merge over the whole text: a blank is a character like others.
"""

from array import array
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from gguf import TokenType
from numpy.typing import NDArray
from tokenizers import Tokenizer as Segmenter
from tokenizers import normalizers
from tokenizers.models import BPE

from ragflash.errors import GGUFInvalid
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

BLANK = "▁"
_BYTE_OF_NAME = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def scored_spelling(file: GGUFFile, vocabulary: Vocabulary) -> Spelling:
    """Build the segmenter of a vocabulary with scores; a few seconds for 262,144 tokens.

    Raises:
        GGUFInvalid: A token has no score, or a byte no token.
    """
    scores = file.require_array(f"{PREFIX}scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise GGUFInvalid(
            f"{PREFIX}scores", 0, f"{len(scores)} scores for {len(vocabulary.tokens)} tokens"
        )
    merges = _scored_merges(vocabulary, np.array(scores))
    spelling = _spelling(vocabulary, merges, vocabulary.atoms, add_bos=True)
    has_opening = file.get(f"{PREFIX}add_space_prefix", bool) is not False  # where it is not said
    return replace(spelling, opening=" " if has_opening else "")


def listed_spelling(file: GGUFFile, vocabulary: Vocabulary) -> Spelling:
    """Build the segmenter of a vocabulary with merges (`gemma4`).

    A merge whose result is no text token is left out: text must not spell it. Runs of line breaks
    are taken whole. BOS is put in front whatever the file says.

    Raises:
        GGUFInvalid: A merge names no token at all, or a byte has none.
    """
    merges = []
    known = frozenset(vocabulary.tokens)
    for left, right in parse_merges(file):
        if not {left, right, left + right} <= known:
            raise GGUFInvalid(f"{PREFIX}merges", 0, f"{left!r} {right!r} is not of known tokens")
        if {left, right, left + right} <= vocabulary.merged.keys():
            merges.append((left, right))
    breaks = [token for token in vocabulary.merged if token and not token.strip("\n")]
    return _spelling(vocabulary, merges, [*vocabulary.atoms, *breaks], add_bos=None)


def _scored_merges(vocabulary: Vocabulary, scores: NDArray[np.float64]) -> list[Merge]:
    find = vocabulary.merged.get
    lefts, rights, wholes = array("I"), array("I"), array("I")
    for token, token_id in vocabulary.merged.items():
        for cut in range(1, len(token)):
            if (left := find(token[:cut])) is None or (right := find(token[cut:])) is None:
                continue
            lefts.append(left)
            rights.append(right)
            wholes.append(token_id)
    order = np.argsort(-scores[np.array(wholes, np.intp)], kind="stable").tolist()
    tokens = vocabulary.tokens
    return [(tokens[lefts[at]], tokens[rights[at]]) for at in order]


def _spelling(
    vocabulary: Vocabulary, merges: list[Merge], atoms: Iterable[str], *, add_bos: bool | None
) -> Spelling:
    for name in _BYTE_OF_NAME:
        if name not in vocabulary.bytes:
            raise GGUFInvalid(f"{PREFIX}tokens", 0, f"no token for the byte {name[1:-1]}")
    ids = {**vocabulary.merged, **vocabulary.bytes, **vocabulary.atoms}
    segmenter = Segmenter(BPE(ids, merges, byte_fallback=True))
    segmenter.normalizer = normalizers.Replace(" ", BLANK)
    take_whole(segmenter, atoms)
    return Spelling(
        segmenter,
        [_bytes(*token) for token in zip(vocabulary.tokens, vocabulary.types, strict=True)],
        np.ones(256, dtype=np.bool_),
        add_bos,
        (BLANK, tuple(vocabulary.bytes[f"<0x{byte:02X}>"] for byte in BLANK.encode())),
    )


def _bytes(token: str, kind: int) -> bytes:
    if kind in HIDDEN_TYPES:
        return b""
    if kind == TokenType.BYTE and token in _BYTE_OF_NAME:
        return _BYTE_OF_NAME[token]
    return (token if kind == TokenType.USER_DEFINED else token.replace(BLANK, " ")).encode()
