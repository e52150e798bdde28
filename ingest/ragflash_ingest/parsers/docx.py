"""Word files: paragraphs, headings, lists, tables, text boxes and notes, in reading order.

The walk is over the XML itself (ECMA-376 part 1, 17): python-docx opens the package and its
styles, but its paragraphs leave out tracked insertions, content controls and text boxes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ragflash_ingest.archive import unpack
from ragflash_ingest.document import Document
from ragflash_ingest.parsers.html import hidden_warning
from ragflash_ingest.parsers.package import embedded_warning, opening
from ragflash_ingest.parsers.writer import TextWriter
from ragflash_ingest.sniff import MediaType

if TYPE_CHECKING:
    from docx.document import Document as WordDocument
    from docx.oxml.xmlchemy import BaseOxmlElement as Element

PARSER = "docx 2"

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_VAL = f"{_W}val"
_PARAGRAPH, _TABLE, _ROW, _CELL, _RUN = (f"{_W}{tag}" for tag in ("p", "tbl", "tr", "tc", "r"))
_TEXT_BOX = f"{_W}txbxContent"
_TEXTS = {f"{_W}t", "{http://schemas.openxmlformats.org/officeDocument/2006/math}t"}
_SIGNS = {
    f"{_W}tab": "\t",
    f"{_W}br": "\n",
    f"{_W}cr": "\n",
    f"{_W}noBreakHyphen": "-",
}
# Deleted or moved away, a second form of the same, or no text.
_SKIPPED = {f"{_W}{tag}" for tag in ("del", "moveFrom", "rt", "pPr", "rPr", "sectPr")} | {
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
}
_HEADING = re.compile(r"heading (\d)", re.IGNORECASE)
_MAX_SPAN = 63  # columns of a table, Word's own limit
_MAIN_TYPE = re.compile(
    rb"application/vnd\.(?:ms-word|openxmlformats-officedocument\.wordprocessingml)"
    rb"\.(?:document|template)(?:\.macroEnabled(?:Template)?)?\.main\+xml"
)


def parse(data: bytes) -> Document:
    """Parse a Word file; macros and links are not followed.

    Raises:
        ParseError: `encrypted`, `corrupt`, `too_large`, or `empty`.
    """
    import docx  # noqa: PLC0415  (half a second that only Word files need)
    from docx.exceptions import PythonDocxError  # noqa: PLC0415  (as above)

    archive = unpack(data)
    with opening("Word file", PythonDocxError):
        word = docx.Document(archive.repack(_as_document))
        walk = _Walk(_read_styles(word))
        notes = list(_notes(word))
        title = word.core_properties.title.strip() or None
        body = word.element.body
    walk.blocks(body)
    if notes:
        walk.writer.heading("Notes", 1)
    for note in notes:
        walk.blocks(note)
    return walk.writer.document(
        MediaType.DOCX,
        PARSER,
        warnings=hidden_warning(walk.hidden) + embedded_warning(archive),
        title=title or walk.title,
    )


def _as_document(name: str, data: bytes) -> bytes:
    """Let a template or a file with macros pass for a document, which its text is."""
    if name != "[Content_Types].xml":
        return data
    return _MAIN_TYPE.sub(MediaType.DOCX.encode() + b".main+xml", data)


@dataclass(frozen=True, slots=True)
class _Styles:
    """What the ids of paragraph styles mean."""

    levels: dict[str, int]
    titles: set[str]
    lists: set[str]


def _read_styles(word: "WordDocument") -> _Styles:
    styles = _Styles({}, set(), set())
    based_on: dict[str, str] = {}
    for style in word.styles.element.iter(f"{_W}style"):
        key = style.get(f"{_W}styleId", "")
        name = _value(style, "name")
        heading = _HEADING.fullmatch(name)
        level = int(heading[1]) if heading else _outline_level(style)
        if name.lower() == "title":
            styles.titles.add(key)
            level = 1
        if level:
            styles.levels[key] = level
        if style.find(f"{_W}pPr/{_W}numPr") is not None:
            styles.lists.add(key)
        based_on[key] = _value(style, "basedOn")
    for key in based_on:
        ancestor, steps = key, 0
        while ancestor in based_on and ancestor not in styles.levels and steps < 10:
            ancestor, steps = based_on[ancestor], steps + 1
        if ancestor in styles.levels:
            styles.levels[key] = styles.levels[ancestor]
    return styles


def _notes(word: "WordDocument") -> Iterator["Element"]:
    """Footnotes and endnotes, without the lines that separate them from the page."""
    from docx.oxml.parser import parse_xml  # noqa: PLC0415  (as above)

    for relation in word.part.rels.values():
        if relation.is_external or not relation.reltype.endswith(("/footnotes", "/endnotes")):
            continue
        for note in parse_xml(relation.target_part.blob):
            if note.get(f"{_W}type") in {None, "normal"}:
                yield note


def _value(element: "Element", path: str) -> str:
    """Attribute `val` of a descendant; "" where there is none."""
    found = element.find("/".join(_W + step for step in path.split("/")))
    return "" if found is None else found.get(_VAL, "")


def _outline_level(element: "Element") -> int | None:
    value = _value(element, "pPr/outlineLvl")
    return int(value) + 1 if value.isascii() and value.isdigit() and int(value) < 9 else None


@dataclass(slots=True)
class _Walk:
    """One pass over a document's blocks."""

    styles: _Styles
    writer: TextWriter = field(default_factory=TextWriter)
    hidden: int = 0
    title: str | None = None
    in_list: bool = False

    def blocks(self, parent: "Element") -> None:
        for child in parent:
            if child.tag == _PARAGRAPH:
                self.paragraph(child)
            elif child.tag == _TABLE:
                self.in_list = False
                self.writer.table(list(self.rows(child)))
            elif child.tag not in _SKIPPED:
                self.blocks(child)  # content controls, tracked insertions

    def paragraph(self, paragraph: "Element") -> None:
        boxes: list[Element] = []
        text = "".join(self.pieces(paragraph, boxes))
        style = _value(paragraph, "pPr/pStyle")
        level = _outline_level(paragraph) or self.styles.levels.get(style)
        listed = style in self.styles.lists or bool(_value(paragraph, "pPr/numPr/numId"))
        if not text.strip():
            pass
        elif level:
            self.writer.heading(text, level)
            if style in self.styles.titles and self.title is None:
                self.title = " ".join(text.split())
        elif listed:
            write = self.writer.line if self.in_list else self.writer.paragraph
            write(f"- {text.strip()}")
        else:
            self.writer.paragraph(text)
        if text.strip():
            self.in_list = listed and not level
        for box in boxes:
            self.blocks(box)

    def pieces(self, parent: "Element", boxes: list["Element"]) -> Iterator[str]:
        """Text inside a paragraph; text boxes are collected, since they stand beside it."""
        for child in parent:
            if child.tag in _TEXTS:
                yield child.text or ""
            elif child.tag in _SIGNS:
                yield _SIGNS[child.tag]
            elif child.tag == _TEXT_BOX:
                boxes.append(child)
            elif child.tag == _RUN and _is_hidden(child):
                self.hidden += 1
            elif child.tag not in _SKIPPED:
                yield from self.pieces(child, boxes)

    def rows(self, table: "Element") -> Iterator[list[str]]:
        """Cells by row; a merged cell's text stands in every cell that it covers."""
        above: dict[int, str] = {}
        for row in _nearest(table, _ROW):
            cells: list[str] = []
            for cell in _nearest(row, _CELL):
                text = " ".join("".join(self.pieces(p, [])) for p in cell.iter(_PARAGRAPH))
                merge = cell.find(f"{_W}tcPr/{_W}vMerge")
                if merge is not None and merge.get(_VAL) != "restart":
                    text = above.get(len(cells), "")
                span = _value(cell, "tcPr/gridSpan")
                width = int(span) if span.isascii() and span.isdigit() else 1
                cells += [text] * max(1, min(width, _MAX_SPAN))
            above = dict(enumerate(cells))
            yield cells


def _is_hidden(run: "Element") -> bool:
    vanish = run.find(f"{_W}rPr/{_W}vanish")
    return vanish is not None and vanish.get(_VAL, "1") not in {"0", "false", "off"}


def _nearest(parent: "Element", tag: str) -> Iterator["Element"]:
    """Descendants of a tag, also inside content controls, but not inside each other."""
    for child in parent:
        if child.tag == tag:
            yield child
        elif child.tag not in _SKIPPED:
            yield from _nearest(child, tag)
