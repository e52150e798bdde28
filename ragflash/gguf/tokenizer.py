"""Text to token ids and back, from the vocabulary inside a GGUF file.

Two encodings are kept apart. `encode` is for text that somebody wrote: what looks like a control
token in it stays text, so that no document can speak as the system. `encode_markup` is for the
output of a chat template, where control tokens are meant.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import tokenizers
from gguf import TokenType
from numpy.typing import NDArray
from tokenizers.models import BPE

from ragflash.errors import GGUFInvalid, InputError, TokenizerUnknown
from ragflash.gguf.pre_tokenizer import PRE_TOKENIZERS, PreTokenizerRecipe
from ragflash.gguf.reader import GGUFFile

_PREFIX = "tokenizer.ggml."
_FINGERPRINT_VERSION = 1  # raise it when the same metadata begins to give other ids
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_STOP_TEXTS = frozenset({"<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<turn|>", "<|eot_id|>"})
_MARKUP_TYPES = (TokenType.CONTROL, TokenType.USER_DEFINED)


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's mapping)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_SYMBOLS = _byte_symbols()
BYTE_OF_SYMBOL = {ord(symbol): byte for byte, symbol in enumerate(BYTE_SYMBOLS)}


@dataclass(frozen=True)
class _Vocabulary:
    """The vocabulary as the file has it, checked."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: list[tuple[str, str]]
    recipe: PreTokenizerRecipe

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        tokens = file.require_array(f"{_PREFIX}tokens", str)
        types = file.require_array(f"{_PREFIX}token_type", int)
        if not tokens or len(types) != len(tokens):
            raise GGUFInvalid(
                f"{_PREFIX}token_type", 0, f"{len(types)} types for {len(tokens)} tokens"
            )
        merges: list[tuple[str, str]] = []
        for merge in file.require_array(f"{_PREFIX}merges", str):
            left, _, right = merge.partition(" ")
            merges.append((left, right))
        return cls(tokens, types, merges, _recipe(file))

    @cached_property
    def ordinary(self) -> dict[str, int]:
        """Tokens that plain text can turn into."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind not in _MARKUP_TYPES
        }

    def check(self) -> None:
        """Raise `GGUFInvalid` where text would be lost or a merge names no ordinary token."""
        for left, right in self.merges:
            for token in (left, right, left + right):
                if token not in self.ordinary:
                    raise GGUFInvalid(
                        f"{_PREFIX}merges", 0, f"{left!r} {right!r}: {token!r} is no text token"
                    )
        for byte in (*range(0x20, 0x7F), 0x0A):
            if BYTE_SYMBOLS[byte] not in self.ordinary:
                raise GGUFInvalid(f"{_PREFIX}tokens", 0, f"no token for the byte 0x{byte:02X}")


class Tokenizer:
    """Byte-level BPE; immutable, hence safe to share between threads.

    Attributes:
        vocab_size: Number of ids; they are 0 … `vocab_size` - 1.
        bos_id: Begins a prompt where `add_bos` is set.
        eos_id: Ends a text.
        stop_ids: Ids that end an answer: end of text, of turn or of message.
        add_bos: Whether the model was trained with `bos_id` in front of every prompt.
        fingerprint: Hexadecimal digest of all that ids depend on.
    """

    def __init__(self, file: GGUFFile, vocabulary: _Vocabulary) -> None:
        vocabulary.check()
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        model = BPE(
            vocabulary.ordinary,
            vocabulary.merges,
            ignore_merges=vocabulary.recipe.ignore_merges,
        )
        self._bpe = tokenizers.Tokenizer(model)
        self._bpe.pre_tokenizer = vocabulary.recipe.build()
        self._is_covered = np.array([symbol in vocabulary.ordinary for symbol in BYTE_SYMBOLS])
        self._markup_ids = {
            token: token_id
            for token_id, token in enumerate(self._tokens)
            if token and self._types[token_id] in _MARKUP_TYPES
        }
        longest_first = sorted(self._markup_ids, key=len, reverse=True)
        self._markup = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

        self.vocab_size = len(self._tokens)
        self.bos_id = self._special_id(file, "bos_token_id")
        self.eos_id = self._special_id(file, "eos_token_id")
        self.stop_ids = self._find_stop_ids(file)
        add_bos = file.get(f"{_PREFIX}add_bos_token", bool)
        self.add_bos = vocabulary.recipe.add_bos if add_bos is None else add_bos
        self.fingerprint = _fingerprint(file)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """Build the tokenizer that `file` describes.

        Raises:
            TokenizerUnknown: Its kind or its pre-tokenizer is not implemented.
            GGUFInvalid: The vocabulary contradicts itself.
        """
        return cls(file, _Vocabulary.from_gguf(file))

    def encode(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token.

        A character whose UTF-8 bytes have no token (some vocabularies lack a few C0 controls and
        unassigned planes) gives no ids for these bytes, as in the model's own tokenizer.

        Raises:
            InputError: The text holds half of a surrogate pair.
        """
        try:
            ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise InputError("the text holds half of a surrogate pair") from error
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Like `encode`, and the character at which each token starts.

        Starts never decrease. Tokens that share the bytes of one character share its start.
        """
        ids = self.encode(text)
        stored = np.frombuffer(text.encode(), np.uint8)
        character_of_byte = np.cumsum(stored & 0xC0 != 0x80) - 1  # continuation bytes start none
        covered = character_of_byte[self._is_covered[stored]]
        lengths = self._lengths[ids]
        return ids, covered[np.cumsum(lengths) - lengths].tolist()

    def encode_markup(self, text: str) -> list[int]:
        """Ids of template text, in which control and user-defined tokens are recognised."""
        ids: list[int] = []
        position = 0
        for match in self._markup.finditer(text):
            ids += self.encode(text[position : match.start()])
            ids.append(self._markup_ids[match[0]])
            position = match.end()
        return ids + self.encode(text[position:])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for control tokens."""
        self._require_known(token_id)
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary spells it, control tokens included."""
        self._require_known(token_id)
        return self._tokens[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether a token is one that the model steers with and no reader should see."""
        self._require_known(token_id)
        return self._types[token_id] == TokenType.CONTROL

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [
            b"" if kind == TokenType.CONTROL else _spelled_bytes(token, kind)
            for token, kind in zip(self._tokens, self._types, strict=True)
        ]

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([len(spelled) for spelled in self._bytes], dtype=np.int64)

    def _require_known(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is not below {self.vocab_size}")

    def _special_id(self, file: GGUFFile, name: str) -> int | None:
        token_id = file.get(f"{_PREFIX}{name}", int)
        if token_id is not None and not 0 <= token_id < self.vocab_size:
            raise GGUFInvalid(
                f"{_PREFIX}{name}", 0, f"{token_id} is not below the {self.vocab_size} tokens"
            )
        return token_id

    def _find_stop_ids(self, file: GGUFFile) -> frozenset[int]:
        named = (self._special_id(file, key) for key in _STOP_KEYS)
        spelled = (self._markup_ids.get(text) for text in _STOP_TEXTS)
        return frozenset(token_id for token_id in (*named, *spelled) if token_id is not None)


def _recipe(file: GGUFFile) -> PreTokenizerRecipe:
    kind = file.require(f"{_PREFIX}model", str)
    if kind != "gpt2":
        raise TokenizerUnknown(f"{_PREFIX}model is {kind!r}; ragflash reads 'gpt2'")
    name = file.get(f"{_PREFIX}pre", str)
    recipe = PRE_TOKENIZERS.get(name or "")
    if recipe is None:
        raise TokenizerUnknown(
            f"{_PREFIX}pre is {name!r}; ragflash knows {', '.join(PRE_TOKENIZERS)}"
        )
    return recipe


def _spelled_bytes(token: str, kind: int) -> bytes:
    """User-defined tokens are spelled as they are, all others a character per byte."""
    if kind != TokenType.USER_DEFINED:
        spelled = token.translate(BYTE_OF_SYMBOL)
        if all(ord(symbol) < 256 for symbol in spelled):
            return spelled.encode("latin-1")
    return token.encode("utf-8")


def _fingerprint(file: GGUFFile) -> str:
    described: Mapping[str, object] = {
        key: value for key, value in file.metadata.items() if key.startswith(_PREFIX)
    }
    canonical = json.dumps([_FINGERPRINT_VERSION, described], sort_keys=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
