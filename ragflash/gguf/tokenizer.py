"""Text to token ids and back, from the vocabulary inside a GGUF file.

Two encodings are kept apart. `encode` is for text that somebody wrote: what looks like a control
token in it stays text, so that no document can speak as the system. `encode_markup` is for the
output of a chat template, where control tokens are meant.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ragflash.errors import GGUFInvalid, InputError, SettingInvalid, TokenizerUnknown
from ragflash.gguf.byte_level import byte_level_spelling
from ragflash.gguf.pre_tokenizer import PRE_TOKENIZERS, PreTokenizerRecipe
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.sentencepiece import listed_spelling, scored_spelling
from ragflash.gguf.vocabulary import HIDDEN_TYPES, PREFIX, MarkupFinder, Spelling, Vocabulary
from ragflash.gguf.word_cuts import cut_between_words

_FINGERPRINT_VERSION = 1  # raise it when the same metadata begins to give other ids
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_STOP_TEXTS = frozenset({"<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<turn|>", "<|eot_id|>"})
_KINDS = ("gpt2", "llama", "gemma4")


class Tokenizer:
    """Byte-level BPE or SentencePiece; immutable, hence safe to share between threads.

    Attributes:
        vocab_size: Number of ids; they are 0 … `vocab_size` - 1.
        bos_id: Begins a prompt where `add_bos` is set.
        eos_id: Ends a text.
        stop_ids: Ids that end an answer: end of text, of turn or of message.
        add_bos: Whether the model was trained with `bos_id` in front of every prompt.
        markup: Finds what `encode_markup` takes for one token, and `encode` never does.
        fingerprint: Hexadecimal digest of all that ids depend on.
    """

    def __init__(
        self, file: GGUFFile, vocabulary: Vocabulary, spelling: Spelling, fingerprint: str
    ) -> None:
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        self._segmenter = spelling.segmenter
        self._bytes = spelling.token_bytes
        self._is_covered = spelling.is_covered
        self._escaped = spelling.escaped
        self._opening = spelling.opening
        self._is_by_words = spelling.is_by_words
        self._markup_ids = vocabulary.markup
        self.markup = MarkupFinder(self._markup_ids)

        self.vocab_size = len(self._tokens)
        self.bos_id = self._special_id(file, "bos_token_id")
        self.eos_id = self._special_id(file, "eos_token_id")
        self.stop_ids = self._find_stop_ids(file)
        self.add_bos = _add_bos(file, spelling)
        self.fingerprint = fingerprint

    @classmethod
    def from_gguf(cls, file: GGUFFile, *, pre_tokenizer: str | None = None) -> Self:
        """Build the tokenizer that `file` describes.

        Args:
            file: May be closed afterwards.
            pre_tokenizer: Cuts text into words in place of the one that the file names.

        Raises:
            TokenizerUnknown: Its kind or its pre-tokenizer is not implemented.
            SettingInvalid: `pre_tokenizer` is not known, or the file's kind has no use for one.
            GGUFInvalid: The vocabulary contradicts itself.
        """
        kind = file.require(f"{PREFIX}model", str)
        if kind not in _KINDS:
            raise TokenizerUnknown(f"{PREFIX}model is {kind!r}; ragflash reads {', '.join(_KINDS)}")
        fingerprint = _fingerprint(file, pre_tokenizer)
        vocabulary = Vocabulary.from_gguf(file)
        if kind == "gpt2":
            spelling = byte_level_spelling(file, vocabulary, _recipe(file, pre_tokenizer))
            return cls(file, vocabulary, spelling, fingerprint)
        if pre_tokenizer is not None:
            raise SettingInvalid(
                f"pre_tokenizer = {pre_tokenizer!r}: the vocabulary of {file.path.name} "
                f"({PREFIX}model = {kind!r}) is not cut into words; leave it unset"
            )
        if kind == "gemma4":
            spelling = listed_spelling(file, vocabulary)
        else:
            spelling = scored_spelling(file, vocabulary)
        return cls(file, vocabulary, spelling, fingerprint)

    def encode(self, text: str, *, opens: bool = False) -> list[int]:
        """Ids of text in which nothing is a control token.

        With `opens` it is the beginning of a prompt, where some models (Llama 2, early Mistral)
        want a blank.

        A character whose UTF-8 bytes have no token (some vocabularies lack a few C0 controls and
        unassigned planes) gives no ids for these bytes, as in the model's own tokenizer. A `▁` is
        spelled in bytes where the model's own tokenizer would make a blank of it.

        Raises:
            InputError: The text holds half of a surrogate pair.
        """
        if opens and text:
            text = self._opening + text
        if self._escaped is None:
            return self._segment(text)
        escaped, byte_ids = self._escaped
        first, *others = text.split(escaped)
        ids = self._segment(first)
        for run in others:
            ids += byte_ids
            ids += self._segment(run)
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

    def encode_markup(self, text: str, *, opens: bool = False) -> list[int]:
        """Ids of template text, in which control and user-defined tokens are recognised.

        With `opens` it is the beginning of a prompt; a control token there wants no blank.
        """
        ids: list[int] = []
        for run, is_token in self.markup.split(text):
            ids += (self._markup_ids[run],) if is_token else self.encode(run, opens=opens)
            opens = False
        return ids

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
        return self._types[token_id] in HIDDEN_TYPES

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([len(spelled) for spelled in self._bytes], dtype=np.int64)

    def _segment(self, text: str) -> list[int]:
        pieces = cut_between_words(text) if self._is_by_words else [text]
        try:
            encoded = self._segmenter.encode_batch_fast(pieces, add_special_tokens=False)
        except TypeError as error:
            raise InputError("the text holds half of a surrogate pair") from error
        return [token_id for piece in encoded for token_id in piece.ids]

    def _require_known(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is not below {self.vocab_size}")

    def _special_id(self, file: GGUFFile, name: str) -> int | None:
        token_id = file.get(f"{PREFIX}{name}", int)
        if token_id is not None and not 0 <= token_id < self.vocab_size:
            raise GGUFInvalid(
                f"{PREFIX}{name}", 0, f"{token_id} is not below the {self.vocab_size} tokens"
            )
        return token_id

    def _find_stop_ids(self, file: GGUFFile) -> frozenset[int]:
        named = (self._special_id(file, key) for key in _STOP_KEYS)
        spelled = (self._markup_ids.get(text) for text in _STOP_TEXTS)
        return frozenset(token_id for token_id in (*named, *spelled) if token_id is not None)


def _add_bos(file: GGUFFile, spelling: Spelling) -> bool:
    said = file.get(f"{PREFIX}add_bos_token", bool)
    if spelling.add_bos is None:
        return True
    return spelling.add_bos if said is None else said


def _recipe(file: GGUFFile, override: str | None) -> PreTokenizerRecipe:
    name = override or file.get(f"{PREFIX}pre", str)
    recipe = PRE_TOKENIZERS.get(name or "")
    if recipe is not None:
        return recipe
    known = f"ragflash knows {', '.join(PRE_TOKENIZERS)}"
    if override is not None:
        raise SettingInvalid(f"pre_tokenizer = {override!r}: {known}")
    raise TokenizerUnknown(
        f"{PREFIX}pre is {name!r}; {known}. If this model cuts text into words like one of these, "
        "name it in RAGFLASH_PRE_TOKENIZER"
    )


def _fingerprint(file: GGUFFile, pre_tokenizer: str | None) -> str:
    described: Mapping[str, object] = {
        key: value for key, value in file.metadata.items() if key.startswith(PREFIX)
    }
    if pre_tokenizer is not None:
        described = {**described, f"{PREFIX}pre": pre_tokenizer}
    canonical = json.dumps([_FINGERPRINT_VERSION, described], sort_keys=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
