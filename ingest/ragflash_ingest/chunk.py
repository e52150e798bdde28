"""Cutting a document into chunks: ranges of its text, made from cut points, never searched for."""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

from ragflash_ingest.document import Chunk, Document
from ragflash_ingest.sentences import each_sentence

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_WORD = re.compile(r"(?<=\s)\S")
_FEW_LETTERS = 40
_SAMPLE_CHARS = 20_000  # tell how wide a document's characters are
SECTION_SEPARATOR = " › "


def chunk(
    document: Document,
    *,
    target_chars: int = 1100,
    max_chars: int = 1500,
    overlap_chars: int = 150,
    check: Callable[[], None] = lambda: None,
) -> list[Chunk]:
    """Split a document where it hurts least: sections, then paragraphs, sentences, words.

    A chunk is `document.text[start:end]`, at most `max_chars` long, without white space or
    furniture at its edges; what is furniture but for a few words (an index) makes none. A
    section of less than a fifth of the target is joined with the next. Neighbours inside a
    section share up to `overlap_chars`. Where the characters are wide (Unicode annex 11), as those
    of Chinese, Japanese and Korean are, one says about as much as two others, so that all lengths
    are divided by the mean width, 1 to 2.

    A long text takes minutes: `check` is called all the time, and what it raises ends the work.

    Raises:
        ValueError: The lengths do not fit together.
    """
    if not 0 <= 2 * overlap_chars < target_chars <= max_chars:
        raise ValueError("lengths must obey 2 × overlap_chars < target_chars ≤ max_chars")
    width = _mean_width(document.text)
    lengths = [round(length / width) for length in (target_chars, max_chars, overlap_chars)]
    cutter = _Cutter(document, *lengths, check=check)
    chunks: list[Chunk] = []
    covered = 0
    for raw_start, raw_end in cutter.ranges():
        check()
        start, end = cutter.trim(raw_start, raw_end)
        if end <= max(start, covered) or cutter.is_furniture(raw_start, raw_end):
            continue
        covered = end
        path = document.section_path(start)
        chunks.append(
            Chunk(
                index=len(chunks),
                start=start,
                end=end,
                text=document.text[start:end],
                page_start=document.page_at(start).number,
                page_end=document.page_at(end - 1).number,
                section=SECTION_SEPARATOR.join(path) or None,
            )
        )
    return chunks


class _Cutter:
    """Cut points of one document by strength, and the walk over them."""

    def __init__(
        self,
        document: Document,
        target: int,
        longest: int,
        overlap: int,
        *,
        check: Callable[[], None],
    ) -> None:
        self.text = document.text
        self.furniture = document.furniture
        self.target, self.longest, self.overlap = target, longest, overlap
        self.sections = sorted({part.start for part in document.sections if part.end is None})
        self.paragraphs = [gap.end() for gap in _PARAGRAPH.finditer(self.text)]
        self.sentences: list[int] = []
        for start, _ in each_sentence(self.text, skip=self.furniture):
            check()
            self.sentences.append(start)

    def ranges(self) -> Iterator[tuple[int, int]]:
        start = 0
        while start < len(self.text):
            end = self._end(start)
            yield start, end
            start = self._next_start(start, end)

    def trim(self, start: int, end: int) -> tuple[int, int]:
        """Take white space and furniture off both ends."""
        while start < end:
            first, last = self._furniture_at(start), self._furniture_at(end - 1)
            if self.text[start].isspace():
                start += 1
            elif first:
                start = min(first[1], end)
            elif self.text[end - 1].isspace():
                end -= 1
            elif last:
                end = max(last[0], start)
            else:
                break
        return start, end

    def is_furniture(self, start: int, end: int) -> bool:
        """Whether a range is furniture with hardly a word between."""
        first = bisect_right(self.furniture, start, key=lambda piece: piece[1])
        cursor, own = start, 0
        for piece_start, piece_end in self.furniture[first:]:
            if piece_start >= end:
                break
            own += _letters(self.text[cursor : max(piece_start, cursor)])
            cursor = piece_end
        own += _letters(self.text[cursor:end])
        return own < _FEW_LETTERS and 2 * own < _letters(self.text[start:end])

    def _furniture_at(self, offset: int) -> tuple[int, int] | None:
        index = bisect_right(self.furniture, offset, key=lambda piece: piece[0]) - 1
        if index >= 0 and offset < self.furniture[index][1]:
            return self.furniture[index]
        return None

    def _end(self, start: int) -> int:
        """Where a chunk that begins at `start` ends."""
        least = start + self.target // 5
        section = bisect_right(self.sections, least)
        if section < len(self.sections) and self.sections[section] <= start + self.longest:
            return self.sections[section]
        if len(self.text) <= start + self.longest:
            return len(self.text)
        soft = start + self.target
        for cuts in (self.paragraphs, self.sentences):
            best = bisect_right(cuts, soft) - 1
            if best >= 0 and cuts[best] > start + self.target // 2:
                return cuts[best]
        late = bisect_right(self.sentences, soft)
        if late < len(self.sentences) and self.sentences[late] <= start + self.longest:
            return self.sentences[late]
        words = [match.start() for match in _WORD.finditer(self.text, least, soft + 1)]
        return words[-1] if words else soft

    def _next_start(self, start: int, end: int) -> int:
        """Begin of the next chunk: at a section, or some sentences, lines or words back."""
        section = bisect_left(self.sections, end)
        if (
            not self.overlap
            or self.sections[section : section + 1] == [end]
            or end == len(self.text)
        ):
            return end
        earliest = max(end - self.overlap, start + 1)
        sentence = bisect_left(self.sentences, earliest)
        if sentence < len(self.sentences) and self.sentences[sentence] < end:
            return self.sentences[sentence]
        line = self.text.find("\n", earliest, end - 1)
        if line >= 0:
            return line + 1
        word = _WORD.search(self.text, earliest, end)
        return word.start() if word else end


def _mean_width(text: str) -> float:
    """Mean width of a text's characters, white space left out, in columns."""
    step = max(1, len(text) // _SAMPLE_CHARS)
    seen = [char for char in text[::step] if not char.isspace()]
    wide = sum(not char.isascii() and unicodedata.east_asian_width(char) in "WF" for char in seen)
    return 1 + wide / len(seen) if seen else 1.0


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))
