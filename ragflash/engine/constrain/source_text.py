"""The document text of a prompt, byte by byte, with the tokens that the prompt spells it with."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ragflash.engine.constrain.spelling import NONE, Places, Spellings, Text, Tokens
from ragflash.engine.constrain.words import Words
from ragflash.engine.prompt import CompiledPrompt

SENTINEL = 256
_UNKNOWN = -2


@dataclass(frozen=True, slots=True)
class Run:
    """Text that is contiguous in prompt and source.

    Attributes:
        source: Index into the prompt's `source_ids`.
        start_char: Of its first character, in the source.
        first: Position of that character in the text of all runs.
        end: Position of the sentinel behind its last one.
    """

    source: int
    start_char: int
    first: int
    end: int


@dataclass(frozen=True)
class SourceText:
    """All runs one after the other, a line break behind each.

    A place is the index of a byte, a position that of a character. Shared by all requests that
    quote the same text, from several threads.

    Attributes:
        data: Bytes; `SENTINEL` where no quote goes on.
        own: Token of the prompt that begins at each place, or `NONE`.
        places: Of all positions.
        stops: Positions that no quote holds: ends of runs, and characters with a byte that is no
            token, so that a quote could get stuck in them.
        runs: In order.
        text: Of all runs.
    """

    data: Text
    own: Tokens
    places: Places
    stops: Places
    runs: tuple[Run, ...]
    text: str
    spellings: Spellings

    @cached_property
    def stored(self) -> bytes:
        """The text of all runs as bytes."""
        return self.text.encode()

    @cached_property
    def words(self) -> Words:
        """Where words and cells begin and end."""
        return Words.of(self.text)

    def longest(self, places: Places) -> Tokens:
        """Return the longest token that spells what stands at each place, or `NONE`."""
        unknown = places[self._longest[places] == _UNKNOWN]
        if len(unknown):
            self._longest[unknown] = self.spellings.longest(self.data, unknown)
        found: Tokens = self._longest[places]
        return found

    def spell_all(self) -> None:
        """Do the work of `longest` for every place: a quote may come to most of them."""
        self.longest(np.arange(len(self.data)))

    def source_range(self, start: int, end: int) -> tuple[int, int, int]:
        """Return the source of a range of places within a run, and its characters there."""
        first, last = (int(at) for at in np.searchsorted(self.places, (start, end)))
        run = self.runs[int(np.searchsorted([run.end for run in self.runs], first))]
        shift = run.start_char - run.first
        return run.source, first + shift, last + shift

    @cached_property
    def _longest(self) -> Tokens:
        return np.full(len(self.data), _UNKNOWN, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SourceTokens:
    """Prompt tokens that copy sources, and which characters of them: see `TokenSources`.

    Attributes:
        places: Of the tokens in the prompt.
    """

    places: Places
    ids: Tokens
    source: Places
    start: Places
    end: Places
    lead: Places

    @classmethod
    def of(cls, source_ids: Collection[str], prompt: CompiledPrompt) -> "SourceTokens":
        """Find those of some sources, possibly none."""
        sources = prompt.sources
        wanted = [at for at, name in enumerate(prompt.source_ids) if name in source_ids]
        places = np.flatnonzero(np.isin(sources.source, wanted))
        traced = (sources.source, sources.start, sources.end, sources.lead)
        ids = np.asarray(prompt.token_ids, dtype=np.int32)
        return cls(places, ids[places], *(values[places] for values in traced))

    @property
    def content(self) -> bytes:
        """All of it, as a key."""
        fields = (self.places, self.ids, self.source, self.start, self.end, self.lead)
        return np.concatenate(fields, dtype=np.int32, casting="same_kind").tobytes()


def build_source_text(tokens: SourceTokens, spellings: Spellings) -> SourceText | None:
    """Lay out the text that tokens of a prompt copy; `None` if they hold no whole character.

    A vocabulary may lack the bytes of rare characters: such a character has no token, or not all
    of them, and parts the text in front of it from that behind it.
    """
    spelled = _Spelled(tokens, spellings)
    runs, texts, owns, first = [], [], [], 0
    for from_token, to_token in spelled.runs():
        found = spelled.text(from_token, to_token)
        if found is None:
            continue
        text, start_char, own = found
        runs.append(Run(int(tokens.source[from_token]), start_char, first, first + len(text)))
        texts.append(text)
        owns += [own, np.array([NONE], dtype=np.int32)]
        first += len(text) + 1
    if not runs:
        return None
    text = "".join(run + "\n" for run in texts)
    stored = np.frombuffer(text.encode(), dtype=np.uint8)
    places = np.flatnonzero(_begins_character(stored))
    position = np.cumsum(_begins_character(stored)) - 1
    unspelled = position[~spellings.is_byte[stored]]
    stops = np.union1d(unspelled, [run.end for run in runs])
    data = np.where(np.isin(position, stops), np.uint16(SENTINEL), stored)
    return SourceText(data, np.concatenate(owns), places, stops, tuple(runs), text, spellings)


class _Spelled:
    """Prompt tokens as the bytes that they stand for, each byte traced to the source.

    Where a token's characters are, is known from the tokenizer. As long as its bytes count them
    alike, the number of a character in the source and among the bytes differ by a constant.
    """

    def __init__(self, tokens: SourceTokens, spellings: Spellings) -> None:
        self._tokens = tokens
        pieces = [spellings.token_bytes[token] for token in tokens.ids.tolist()]
        self._stored = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        begins = _begins_character(self._stored)
        self._characters = np.flatnonzero(begins)
        self._num_begun = np.append(0, np.cumsum(begins))  # before each byte
        self._bytes = np.append(0, np.cumsum(spellings.length[tokens.ids], dtype=np.int64))
        at = self._bytes[:-1]
        begins_inside = np.append(~begins, False)[at]
        self._shift = tokens.start - tokens.lead - (self._num_begun[at] - begins_inside)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of tokens that are contiguous in prompt and source."""
        is_break = (
            (np.diff(self._tokens.places) != 1)
            | (np.diff(self._tokens.source) != 0)
            | (np.diff(self._shift) != 0)
        )
        breaks = 1 + np.flatnonzero(is_break)
        yield from pairwise(dict.fromkeys([0, *breaks.tolist(), len(self._tokens.ids)]))

    def text(self, from_token: int, to_token: int) -> tuple[str, int, Tokens] | None:
        """Return the whole characters of a run, where they start in the source, and its tokens."""
        shift = int(self._shift[from_token])
        num_begun = self._num_begun[self._bytes[to_token]]
        if shift + num_begun < self._tokens.end[to_token - 1]:  # the last token lacks bytes
            to_token -= 1
        if to_token <= from_token:
            return None
        from_byte, to_byte = int(self._bytes[from_token]), int(self._bytes[to_token])
        first = max(int(self._tokens.start[from_token]) - shift, int(self._num_begun[from_byte]))
        behind = min(int(self._tokens.end[to_token - 1]) - shift, int(self._num_begun[to_byte]))
        if behind <= first:
            return None
        start = int(self._characters[first])
        end = min(
            int(self._characters[behind] if behind < len(self._characters) else to_byte), to_byte
        )
        own = np.full(end - start, NONE, dtype=np.int32)
        at = self._bytes[from_token:to_token]
        is_within = (start <= at) & (at < end)
        own[at[is_within] - start] = self._tokens.ids[from_token:to_token][is_within]
        return self._stored[start:end].tobytes().decode(), first + shift, own


def _begins_character(stored: NDArray[np.uint8]) -> NDArray[np.bool_]:
    begins: NDArray[np.bool_] = (stored & 0xC0) != 0x80
    return begins
