"""Texts of a wanted number of tokens, of random words: what they say does not matter to speed."""

import random

from ragflash.engine.client import EngineClient
from ragflash.engine.request import ChatMessage, SegmentKind, TextSegment
from ragflash.errors import EngineError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NUM_WORDS = 512
_SHORTEST = " a"


class Filler:
    """Makes texts for one model's tokenizer.

    A word begins with a blank, where tokenizers cut; so the tokens of a text are those of its
    words.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        source = random.Random(0)
        words = {
            " " + "".join(source.choices(_LETTERS, k=source.randint(2, 9)))
            for _ in range(_NUM_WORDS)
        }
        self._words = [(word, len(client.tokenize(word))) for word in sorted(words)]
        self._one = len(client.tokenize(_SHORTEST))

    def text(self, num_tokens: int, seed: int) -> str:
        """Return a text of that many tokens; another seed gives another text from its start.

        Raises:
            EngineError: The tokenizer cuts words in another way, by more than one in a hundred.
        """
        source = random.Random(seed)
        parts: list[str] = []
        left = num_tokens
        while left > 0:
            word, count = source.choice(self._words)
            if count > left:
                word, count = _SHORTEST, self._one
            parts.append(word)
            left -= count
        text = "".join(parts)
        found = len(self._client.tokenize(text))
        if abs(found - num_tokens) > max(4, num_tokens // 100):
            raise EngineError(f"{found} tokens came of words that have {num_tokens} apart")
        return text

    def prompt(self, document: str, question: str) -> tuple[ChatMessage, ...]:
        """Return a chat of a document, remembered under its text, and a question."""
        segments = [TextSegment(SegmentKind.QUESTION, question)]
        if document:
            segments.insert(0, TextSegment(SegmentKind.DOCUMENT, document))
        return (ChatMessage("user", tuple(segments)),)

    def question_for(self, document: str, num_tokens: int, seed: int) -> str:
        """Return a question that makes the whole prompt that many tokens."""
        fixed = self._client.count_tokens(self.prompt(document, ""))
        return self.text(max(1, num_tokens - fixed), seed)
