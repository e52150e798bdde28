"""Lays a prompt's document tokens out for quoting: where quotes may start, end, and must end."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragflash.engine.constrain.quote import SENTINEL, Places, QuoteProgram
from ragflash.engine.prompt import CompiledPrompt
from ragflash.engine.request import QuoteFrom
from ragflash.engine.tokens import Tokenizer
from ragflash.errors import InputError

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Document tokens of the sources, in runs that are contiguous in prompt and source."""

    tokens: Places
    source: Places
    start: Places
    end: Places
    lead: Places
    is_char_end: Flags


def build_quote_program(
    constraint: QuoteFrom,
    prompt: CompiledPrompt,
    tokenizer: Tokenizer,
    token_bytes: Sequence[bytes],
) -> QuoteProgram:
    """Compile a quote constraint for one prompt.

    Raises:
        InputError: The limits contradict, or no text of the sources that could be quoted is in the
            prompt.
    """
    if not 1 <= constraint.min_tokens <= constraint.max_tokens:
        raise InputError("a quote needs 1 <= min_tokens <= max_tokens")
    layout = _lay_out(constraint, prompt, token_bytes)
    edges = _Edges(layout, token_bytes)
    if constraint.ranges:
        edges.snap(_ranges(constraint, prompt))
        starts, ends = _places(edges.starts), _places(edges.ends)
    else:
        ends = np.flatnonzero(layout.is_char_end)
        starts = np.flatnonzero(layout.is_char_end & (layout.tokens != SENTINEL))
    last_end = _last_ends(layout, starts, ends, constraint)
    starts = starts[last_end[starts] > starts]
    if not len(starts):
        raise InputError("no text of the given sources and ranges is in the prompt")
    is_end = np.zeros(len(layout.tokens), dtype=np.bool_)
    is_end[ends] = True
    return QuoteProgram(
        tokens=layout.tokens,
        first_alternative=_alternatives(layout.tokens, starts, edges.lead, tokenizer, token_bytes),
        source=layout.source,
        start_char=edges.start_char,
        end_char=edges.end_char,
        lead=edges.lead,
        starts=starts,
        is_end=is_end,
        is_char_end=layout.is_char_end,
        last_end=last_end,
        min_tokens=constraint.min_tokens,
    )


def _lay_out(
    constraint: QuoteFrom, prompt: CompiledPrompt, token_bytes: Sequence[bytes]
) -> _Layout:
    sources = prompt.sources
    wanted = [i for i, name in enumerate(prompt.source_ids) if name in constraint.source_ids]
    places = np.flatnonzero(np.isin(sources.source, wanted))
    if not len(places):
        raise InputError("no text of the given sources is in the prompt")
    follows = (
        (np.diff(places) == 1)
        & (np.diff(sources.source[places]) == 0)
        & (sources.start[places][1:] == sources.end[places][:-1])
        & (sources.lead[places][1:] == 0)
    )
    run_ends = np.append(np.flatnonzero(~follows) + 1, len(places))
    tokens = np.asarray(prompt.token_ids, dtype=np.int64)[places]
    first_bytes = np.array([(token_bytes[token][:1] or b" ")[0] for token in tokens])
    starts_char = (first_bytes & 0xC0) != 0x80
    return _Layout(
        tokens=np.insert(tokens, run_ends, SENTINEL),
        source=np.insert(sources.source[places], run_ends, SENTINEL),
        start=np.insert(sources.start[places], run_ends, SENTINEL),
        end=np.insert(sources.end[places], run_ends, SENTINEL),
        lead=np.insert(sources.lead[places], run_ends, 0),
        is_char_end=np.insert(starts_char, run_ends, values=True),
    )


class _Edges:
    """Tokens that ranges start and end in, with at most white space up to a token's edge."""

    def __init__(self, layout: _Layout, token_bytes: Sequence[bytes]) -> None:
        self._layout = layout
        self._token_bytes = token_bytes
        self.start_char = layout.start.copy()
        self.end_char = layout.end.copy()
        self.lead = layout.lead.copy()
        self.starts: set[int] = set()
        self.ends: set[int] = set()

    def snap(self, ranges: Places) -> None:
        """Take in ranges `[N, 3]` of source, start and end."""
        layout = self._layout
        sentinels = np.flatnonzero(layout.tokens == SENTINEL)
        for first, last in zip(np.append(0, sentinels[:-1] + 1), sentinels, strict=True):
            run_start, run_end = layout.start[first:last], layout.end[first:last]
            source, start, end = ranges.T
            is_own = source == layout.source[first]
            inside = is_own & (run_start[0] <= start) & (start < run_end[-1])
            for char in start[inside].tolist():
                at = int(np.searchsorted(run_start, char))
                is_exact = at < len(run_start) and run_start[at] == char
                self._start(int(first) + at - (not is_exact), char)
            inside = is_own & (run_start[0] < end) & (end <= run_end[-1])
            for char in end[inside].tolist():
                self._end(int(first) + int(np.searchsorted(run_end, char)), char)

    def _start(self, place: int, char: int) -> None:
        layout = self._layout
        lead = int(layout.lead[place]) + char - int(layout.start[place])
        if layout.is_char_end[place] and not self._text(place)[:lead].strip():
            self.start_char[place] = char
            self.lead[place] = lead
            self.starts.add(place)

    def _end(self, place: int, char: int) -> None:
        layout = self._layout
        kept = int(layout.lead[place]) + char - int(layout.start[place])
        is_whole = int(layout.end[place]) == char
        if layout.is_char_end[place + 1] and (is_whole or not self._text(place)[kept:].strip()):
            self.end_char[place] = char
            self.ends.add(place + 1)

    def _text(self, place: int) -> str:
        return self._token_bytes[int(self._layout.tokens[place])].decode(errors="replace")


def _ranges(constraint: QuoteFrom, prompt: CompiledPrompt) -> Places:
    index = {name: at for at, name in enumerate(prompt.source_ids)}
    rows = [(index[name], start, end) for name, start, end in constraint.ranges if name in index]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _places(places: set[int]) -> Places:
    return np.array(sorted(places), dtype=np.int64)


def _last_ends(layout: _Layout, starts: Places, ends: Places, constraint: QuoteFrom) -> Places:
    """For each start, the furthest permitted end in reach, else the furthest end of a character."""
    sentinels = np.flatnonzero(layout.tokens == SENTINEL)
    run_end = sentinels[np.searchsorted(sentinels, starts)]
    limit = np.minimum(starts + constraint.max_tokens, run_end)
    permitted = _last_at_most(ends, limit)
    anywhere = _last_at_most(np.flatnonzero(layout.is_char_end), limit)
    is_reached = permitted >= starts + constraint.min_tokens
    last_end = np.zeros(len(layout.tokens), dtype=np.int64)
    last_end[starts] = np.where(is_reached, permitted, anywhere)
    return last_end


def _last_at_most(sorted_places: Places, limit: Places) -> Places:
    at = np.searchsorted(sorted_places, limit, side="right") - 1
    padded = np.append(sorted_places, 0)  # index -1: none
    return np.asarray(padded[at], dtype=np.int64)


def _alternatives(
    tokens: Places,
    starts: Places,
    lead: Places,
    tokenizer: Tokenizer,
    token_bytes: Sequence[bytes],
) -> Places:
    """Find, for starts with white space in front, the token that spells the same without it."""
    alternatives = np.full(len(tokens), SENTINEL, dtype=np.int64)
    known: dict[tuple[int, int], int] = {}
    for place in starts[lead[starts] > 0].tolist():
        key = int(tokens[place]), int(lead[place])
        if key not in known:
            text = token_bytes[key[0]].decode(errors="replace")[key[1] :]
            spelling = tokenizer.encode(text)
            known[key] = int(spelling[0]) if len(spelling) == 1 else SENTINEL
        alternatives[place] = known[key]
    return alternatives
