"""Decides where quotes of a text start, and where they may, and at the latest must, end."""

from collections.abc import Iterable

import numpy as np

from ragflash.engine.constrain.quote import QuoteProgram
from ragflash.engine.constrain.source_text import SourceText
from ragflash.engine.constrain.spelling import Places
from ragflash.engine.constrain.words import Flags

Range = tuple[int, int, int]


def words_program(text: SourceText, *, min_words: int, max_characters: int) -> QuoteProgram | None:
    """Quote from word to word: so many words at least, or a whole cell or heading.

    Returns:
        `None` where the text has no such quote.
    """
    words = text.words
    starts = np.flatnonzero(words.is_start)
    cell_end = np.zeros(len(words.is_start), dtype=np.int64)
    cell_end[words.cell_start] = words.cell_end
    cell_end = np.where(_touches_cut(text, starts, cell_end[starts]), 0, cell_end[starts])
    limit = _limits(text, starts, max_characters)
    soonest = words.soonest_ends(starts, min_words)
    latest = _last_at_most(np.flatnonzero(words.is_end), limit)
    latest = np.where(latest >= soonest, latest, 0)
    latest = np.maximum(latest, np.where(cell_end <= limit, cell_end, 0))
    text.spell_all()
    return _program(text, starts, soonest, cell_end, latest, words.is_end)


def ranges_program(
    text: SourceText, ranges: Iterable[Range], *, min_words: int, max_characters: int
) -> QuoteProgram | None:
    """Quote from the start of a range to the end of one; a longer one is cut behind a word.

    Args:
        text: What is quoted.
        ranges: Source, first character there, and the one behind the last.
        min_words: Of a quote.
        max_characters: Of a quote.

    Returns:
        `None` where none of them is in the text.
    """
    words = text.words
    starts, is_end = _snapped(text, ranges)
    limit = _limits(text, starts, max_characters)
    soonest = words.soonest_ends(starts, min_words)
    latest = _last_at_most(np.flatnonzero(is_end), limit)
    anywhere = _last_at_most(np.flatnonzero(words.is_end), limit)
    latest = np.where(latest >= soonest, latest, np.where(anywhere >= soonest, anywhere, 0))
    return _program(text, starts, soonest, np.zeros_like(starts), latest, is_end)


def _program(
    text: SourceText,
    starts: Places,
    soonest: Places,
    cell_end: Places,
    latest: Places,
    is_end: Flags,
) -> QuoteProgram | None:
    """Turn positions into places; a start without an end in reach is none."""
    is_reached = latest > starts
    if not is_reached.any():
        return None
    places = np.append(text.places, len(text.data))
    never = np.minimum(soonest[is_reached], len(text.places))
    is_end_place = np.zeros(len(text.data), dtype=np.bool_)
    is_end_place[text.places] = is_end
    return QuoteProgram(
        text=text,
        start=places[starts[is_reached]],
        soonest=places[never],
        cell_end=np.where(cell_end > 0, places[cell_end], 0)[is_reached],
        latest=places[latest[is_reached]],
        is_end=is_end_place,
    )


def _limits(text: SourceText, starts: Places, max_characters: int) -> Places:
    stop = text.stops[np.searchsorted(text.stops, starts)]
    return np.minimum(starts + max_characters, stop)


def _touches_cut(text: SourceText, starts: Places, ends: Places) -> Flags:
    """Whether a cell reaches to where the prompt may have cut it off its source."""
    cut_starts = [run.first for run in text.runs if run.start_char > 0]
    return np.isin(starts, cut_starts) | np.isin(ends, [run.end for run in text.runs])


def _snapped(text: SourceText, ranges: Iterable[Range]) -> tuple[Places, Flags]:
    """Return where ranges start, and whether one ends before each position; blanks are left out."""
    rows = np.array([*ranges], dtype=np.int64).reshape(-1, 3)
    is_start, is_end = (np.zeros(len(text.places), dtype=np.bool_) for _ in range(2))
    for run in text.runs:
        length = run.end - run.first
        source, start, end = rows.T
        start, end = start - run.start_char, end - run.start_char
        is_own = source == run.source
        is_start[run.first + start[is_own & (start >= 0) & (start < length)]] = True
        is_end[run.first + end[is_own & (end > 0) & (end <= length)]] = True
    filled = text.words.filled
    starts = np.append(filled, 0)[np.searchsorted(filled, np.flatnonzero(is_start))]
    ends = np.append(filled, -1)[np.searchsorted(filled, np.flatnonzero(is_end)) - 1] + 1
    is_end[:] = False
    is_end[ends] = True
    is_end[0] = False
    return np.unique(starts), is_end


def _last_at_most(sorted_positions: Places, limit: Places) -> Places:
    at = np.searchsorted(sorted_positions, limit, side="right") - 1
    padded = np.append(sorted_positions, 0)  # index -1: none
    return np.asarray(padded[at], dtype=np.int64)
