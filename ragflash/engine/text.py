"""Bytes of tokens to text, a piece at a time."""

import codecs


class IncrementalDecoder:
    """UTF-8 decoder that holds an unfinished character back until its last byte has come.

    Bytes that can never become a character turn into U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """Return the characters that `data` completes."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return one replacement mark when the text ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
