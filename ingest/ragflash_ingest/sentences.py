"""Sentence ranges, clean enough to be shown as quotes.

Rules, not a model: Unicode terminators, abbreviations, and line ends. A line end inside a
wrapped paragraph is not a break; one after a short line, before a list item or a heading is.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

_UNWRAPPED_CHARS = 160  # texts whose lines are this long were never wrapped
_NEAR_LINES = 20
_FULL_LINE = 0.8
_SHORT_LINE = 0.6  # of the usual line length: such a line ended because its author ended it
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_MARKER = r"(?:[•‣▪◦●○■□·∙➢✓–—*+-]|\(?(?:\d{1,3}|[a-z]|[ivx]{1,5})[.)]|\(?[A-Z]\)|#{1,6}|>)[^\S\n]+"
_LIST_ITEM = re.compile(rf"[^\S\n]*(?:{_MARKER}|\|)")
_LEAD = re.compile(rf"(?:\s|{_MARKER})*")
_LETTER = re.compile(r"[^\W\d_]")
_NUMBERED_HEADING = re.compile(
    r"(?:\d+(?:\.\d+)*\.?|[A-Z](?:\.\d+)+|Chapter|Section|Appendix|Table|Figure)[^\S\n]+[A-Z0-9]"
)
_TERMINATOR = re.compile(
    r"[。！？｡]+[」』）”’\"')]*"
    r"|[.!?…؟۔।॥։።។၊။‼⁇⁈⁉]+[\"')\]”’»›]*(?=\s|\Z)"
)
_LAST_WORD = re.compile(r"[^\s(\[\"“‘]*\Z")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_GERMAN_ORDINAL = re.compile(  # "am 1. Mai", "im 19. Jahrhundert"
    r"\b(?:ab|am|bis|das|dem|den|der|des|die|im|seit|vom|zum|zur) \d{1,2}\Z", re.IGNORECASE
)
_ABBREVIATED = """
    mr mrs ms dr prof sr jr st vs cf al fig figs eq eqs sec secs ch chap vol vols no nos art
    arts par pp ed eds rev approx ca viz resp incl excl dept gen col capt lt sgt hon rep sen gov
    inc ltd co corp jan feb mar apr jun jul aug sep sept oct nov dec
    bzw usw nr abs abb bspw ggf evtl inkl exkl sog vgl str tel bd hrsg geb jhd mld mio
    mme mlle env éd sra srta ud uds pág núm av sig dott ecc pag tab
"""
_ABBREVIATIONS = frozenset(_ABBREVIATED.split())


def sentences(text: str, *, skip: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Ranges of the sentences of a text; see `each_sentence`."""
    return list(each_sentence(text, skip=skip))


def each_sentence(text: str, *, skip: Sequence[tuple[int, int]] = ()) -> Iterator[tuple[int, int]]:
    """Ranges of the sentences of a text, in order, without overlap.

    White space, list markers and lines of mere numbers are outside of the ranges.

    Args:
        text: Any text; offsets are into it.
        skip: Ascending ranges that belong to no sentence, such as `Document.furniture`.
    """
    lines = _Lines(text)
    for start, end in _outside(skip, len(text)):
        cursor = start
        for gap in [*_PARAGRAPH.finditer(text, start, end), None]:
            paragraph_end = gap.start() if gap else end
            for piece in _pieces(text, cursor, paragraph_end, lines.usual(cursor)):
                trimmed = _trim(text, *piece)
                if trimmed:
                    yield trimmed
            cursor = gap.end() if gap else end


class _Lines:
    """How long lines are near a place: the upper quartile of all but the shortest."""

    def __init__(self, text: str) -> None:
        lengths = [len(line) for line in text.split("\n")]
        self._starts = [0, *accumulate(length + 1 for length in lengths)]
        self._lengths = lengths

    def usual(self, offset: int) -> int:
        line = bisect_right(self._starts, offset)
        near = self._lengths[max(line - _NEAR_LINES, 0) : line + _NEAR_LINES]
        full = sorted(length for length in near if length > 20)
        return full[len(full) * 3 // 4] if full else 0


def _outside(skip: Sequence[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    cursor = 0
    for start, end in skip:
        if start > cursor:
            yield cursor, start
        cursor = max(cursor, end)
    if cursor < length:
        yield cursor, length


def _pieces(text: str, start: int, end: int, usual: int) -> Iterator[tuple[int, int]]:
    """Cut a paragraph at sentence ends, and at line ends that are breaks."""
    breaks = {start, end}
    line_start = start
    while (newline := text.find("\n", line_start, end)) >= 0:
        following = text.find("\n", newline + 1, end)
        next_line = text[newline + 1 : following if following >= 0 else end]
        if _breaks_line(text[line_start:newline], next_line, usual):
            breaks.add(newline)
        line_start = newline + 1
    for match in _TERMINATOR.finditer(text, start, end):
        if _ends_sentence(text, match, end):
            breaks.add(match.end())
    yield from pairwise(sorted(breaks))


def _breaks_line(line: str, following: str, usual: int) -> bool:
    """Whether the line end between two lines of a paragraph is more than a wrap."""
    line = line.strip()
    if usual > _UNWRAPPED_CHARS or _starts_block(following, usual) or _is_block(line, usual):
        return True
    if line.endswith(("-", "\u00ad", "\u2010")):
        return False
    full = _SHORT_LINE * usual
    if len(line) >= full:
        return False
    # Cut short by something else, such as a footnote mark?
    goes_on = len(following) >= full and following[:1].islower()
    return not (goes_on and (line[-1].isalpha() or line[-1] == ","))


def _starts_block(line: str, usual: int) -> bool:
    lone = not _LETTER.search(line)  # a page number, a rule
    return (
        lone or line.startswith("```") or bool(_LIST_ITEM.match(line)) or _is_heading(line, usual)
    )


def _is_block(line: str, usual: int) -> bool:
    """Whether a line stands for itself: a heading, a table's row, what a list follows."""
    marked = line.startswith(("#", "|", "```")) or line.endswith(":") or " | " in line
    return marked or not _LETTER.search(line) or _is_heading(line, usual)


def _is_heading(line: str, usual: int) -> bool:
    """Whether a line begins with a number as headings do, and ends before the line is full."""
    numbered = bool(_NUMBERED_HEADING.match(line)) and len(line) < _FULL_LINE * usual
    return numbered and not line.rstrip().endswith((".", ",", ";"))


def _ends_sentence(text: str, match: re.Match[str], end: int) -> bool:
    """Whether a terminator followed by white space ends its sentence."""
    if match.group()[0] in "。！？｡":
        return True
    after = text[match.end() : min(match.end() + 80, end)].lstrip(" \t")
    if after[:1].islower():
        return False
    if match.group() != ".":
        return True
    found = _LAST_WORD.search(text, max(match.start() - 24, 0), match.start())
    word = found.group() if found else ""
    if word.lower() in _ABBREVIATIONS or _INITIALS.fullmatch(word):
        return False
    if _GERMAN_ORDINAL.search(text, max(match.start() - 8, 0), match.start()):
        return False
    line_start = text.rfind("\n", 0, match.start()) + 1
    return not _LIST_ITEM.match(text, line_start, match.end() + 1) or match.end() - line_start > 6


def _trim(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Take white space and list markers off; None if no words are left."""
    while end > start and text[end - 1].isspace():
        end -= 1
    lead = _LEAD.match(text, start, end)
    start = lead.end() if lead else start
    if text.startswith("```", start) or not _LETTER.search(text, start, end):
        return None
    return start, end
