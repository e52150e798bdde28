"""The output of one request as it grows: tokens, text, and the reason why it ended."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from ragflash.engine.constrain import Cursor
from ragflash.engine.logprobs import Candidate, TokenLogprob
from ragflash.engine.request import FinishReason, QuoteSpan
from ragflash.engine.stop import StopMatcher
from ragflash.engine.text import IncrementalDecoder


class Output:
    """Takes tokens one at a time, so that nothing depends on how many of them a step yields.

    After each token, in this order: stop token, stop string, end of the constraint, length.

    Attributes:
        token_ids: All tokens, the one that ended the output included.
        reason: Why it ended; `None` while it grows.
        num_forced: Tokens that the constraint alone decided.
        num_top: Likeliest tokens wanted with each log-probability; `None` wants none of these.
        logprobs: Of all tokens, when wanted.
        token_bytes: Of every token id.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        stop: Sequence[str],
        cursor: Cursor | None,
        stop_ids: frozenset[int],
        token_bytes: Sequence[bytes],
        num_top: int | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.reason: FinishReason | None = None
        self.num_forced = 0
        self.cursor = cursor
        self.max_tokens = max_tokens
        self.num_top = num_top
        self.logprobs: list[TokenLogprob] = []
        self.token_bytes = token_bytes
        self._stop_ids = stop_ids
        self._decoder = IncrementalDecoder()
        self._matcher = StopMatcher(stop)
        self._shown: list[str] = []
        self._fresh: list[str] = []
        self._num_shown_characters = 0
        self._num_decoded_characters = 0
        self._starts: list[int] = []  # character that each token starts at, stop tokens left out
        self._num_told = 0

    @property
    def num_left(self) -> int:
        """Tokens that the length limit leaves."""
        return self.max_tokens - len(self.token_ids)

    @property
    def text(self) -> str:
        """All text that may be shown."""
        return "".join(self._shown)

    @property
    def num_shown(self) -> int:
        """Tokens whose first character is shown."""
        return bisect_left(self._starts, self._num_shown_characters)

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> bool:
        """Take a token, with its log-probability when wanted; return whether more may follow."""
        assert self.reason is None, "a token after the end"
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        self._end(self._take(token_id))
        return self.reason is None

    def force(self) -> tuple[int, ...]:
        """Take the tokens that the constraint leaves no choice about, and return them."""
        if self.cursor is None or self.reason is not None:
            return ()
        forced = self.cursor.forced(self.num_left)
        taken = 0
        for token_id in forced:
            taken += 1
            if not self.append(token_id, self._certainty(token_id)):
                break
        self.num_forced += taken
        return forced[:taken]

    def end(self, reason: FinishReason) -> None:
        """End the output from outside."""
        self._end(reason)

    def take_text(self) -> str:
        """Return the text that became visible since the last call."""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return those of tokens that became visible since the last call."""
        start, self._num_told = self._num_told, self.num_shown
        return tuple(self.logprobs[start : self._num_told])

    def quotes(self, source_ids: Sequence[str]) -> tuple[QuoteSpan, ...]:
        """Return where the shown text copies sources, given the prompt's names of them."""
        if self.cursor is None:
            return ()
        spans = []
        num_shown = len(self.text)
        for quoted in self.cursor.quotes():
            quote = quoted.quote
            start = len(self._decoded(self.token_ids[: quoted.start]))
            end = start + quote.source_end - quote.source_start
            if end <= num_shown:
                source_id = source_ids[quote.source]
                spans.append(QuoteSpan(start, end, source_id, quote.source_start, quote.source_end))
        return tuple(spans)

    def _decoded(self, token_ids: Iterable[int]) -> str:
        data = b"".join(self.token_bytes[token_id] for token_id in token_ids)
        return data.decode("utf-8", errors="replace")

    def _certainty(self, token_id: int) -> TokenLogprob | None:
        if self.num_top is None:
            return None
        certain = Candidate(token_id, self.token_bytes[token_id], 0.0)
        return TokenLogprob(certain, (certain,) if self.num_top else ())

    def _take(self, token_id: int) -> FinishReason | None:
        cursor = self.cursor
        if token_id in self._stop_ids:
            ends_well = cursor is not None and cursor.can_end
            return FinishReason.CONSTRAINT if ends_well else FinishReason.STOP
        if cursor is not None:
            cursor.advance((token_id,))
        self._starts.append(self._num_decoded_characters)
        decoded = self._decoder.feed(self.token_bytes[token_id])
        self._num_decoded_characters += len(decoded)
        self._show(self._matcher.feed(decoded))
        if self._matcher.found:
            return FinishReason.STOP
        if cursor is not None and cursor.is_done:
            return FinishReason.CONSTRAINT if cursor.can_end else FinishReason.LENGTH
        return FinishReason.LENGTH if self.num_left <= 0 else None

    def _end(self, reason: FinishReason | None) -> None:
        if reason is None:
            return
        self.reason = reason
        self._show(self._matcher.feed(self._decoder.finish()))
        self._show(self._matcher.finish())

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._fresh.append(text)
            self._num_shown_characters += len(text)
