"""Indexes of documents' tokens, which drafts are copied from; kept in files beside the text.

An index is made as a document is taken in, and goes with it. There is one of a document at most: a
model that cuts text otherwise has it made anew when it is first asked.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from ragflash.errors import StorageError
from ragflash.rag.files import FileStore
from ragflash.speculative.lookup import SourceIndex

MOST_CHARACTERS = 4 << 20
"""Of a text that gets an index."""

TOKENS = range(16, 1 << 20)
"""Of a text that gets one: to make it takes up to 150 bytes of memory a token."""

_log = logging.getLogger(__name__)


class TextCutter(Protocol):
    """A model's tokenizer, as far as documents go."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of all that decides how text is cut."""

    def encode(self, text: str) -> Sequence[int]:
        """Cut plain text."""


class LookupIndexes:
    """Makes and opens indexes of parsed documents. Thread-safe; blocks on the disk."""

    def __init__(self, files: FileStore) -> None:
        self._files = files

    def open(self, digest: str, parser: str, text: str, cutter: TextCutter) -> SourceIndex | None:
        """Return a text's index, mapped; made now where none is stored that fits and is sound.

        `None` is for a text that is too short or too long to have one.

        Args:
            digest: SHA-256 of the original.
            parser: What made the text of it.
            text: Of the document.
            cutter: Of the model that drafts are for.
        """
        if len(text) > MOST_CHARACTERS:
            return None
        try:
            block = self._files.map_index(digest, parser, cutter.fingerprint)
            if block is not None:
                return SourceIndex(block)
        except (StorageError, ValueError) as error:
            fields = {"sha256": digest, "reason": str(error)}
            _log.warning("a document's index is made anew", extra=fields)
        return self.make(digest, parser, text, cutter.encode(text), cutter.fingerprint)

    def make(
        self, digest: str, parser: str, text: str, token_ids: Sequence[int], fingerprint: str
    ) -> SourceIndex | None:
        """Index a text's tokens and store that in place of what is stored; see `open`.

        Where the disk refuses, or the document was deleted meanwhile, the index is returned alone.
        """
        if len(text) > MOST_CHARACTERS or len(token_ids) not in TOKENS:
            return None
        index = SourceIndex.build(token_ids)
        try:
            self._files.write_index(digest, parser, fingerprint, bytes(index.block))
        except StorageError as error:
            fields = {"sha256": digest, "reason": error.detail}
            _log.warning("a document's index is not kept", extra=fields)
        return index
