"""HTML: what a reader sees, as paragraphs; nothing is fetched and no script runs."""

import re
from bisect import insort
from dataclasses import dataclass, field

from selectolax.lexbor import LexborHTMLParser, LexborNode

from ragflash_ingest.document import Document, FailureReason, ParseError, Section
from ragflash_ingest.encoding import decode
from ragflash_ingest.parsers.tables import CELL_SEPARATOR, columns
from ragflash_ingest.parsers.text import canonical, single_page
from ragflash_ingest.sniff import MediaType

PARSER = "html 2"

_DECLARED = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
_UNSEEN_TAGS = """
    head script style nav noscript template iframe svg math object canvas select button
"""
_BLOCK_TAGS = """
    address article aside blockquote body caption dd details div dl dt fieldset figcaption figure
    footer form h1 h2 h3 h4 h5 h6 header hr li main ol p pre section summary table tbody tfoot
    thead title tr ul
"""
_UNSEEN, _BLOCKS = frozenset(_UNSEEN_TAGS.split()), frozenset(_BLOCK_TAGS.split())
_TIGHT = frozenset({"li", "tr", "dt", "dd"})  # these are lines, not paragraphs
_HIDING = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?![.\d]*[1-9])")
_SPACES = re.compile(r"[ \t\n\r\f]+")

_NOTHING, _SPACE, _LINE, _PARAGRAPH = range(4)
_GAPS = ("", " ", "\n", "\n\n")


def parse(data: bytes) -> Document:
    """Parse an HTML file.

    Raises:
        ParseError: `empty` (nothing visible) or `encoding_unknown`.
    """
    declared = _DECLARED.search(data[:2048])
    decoded = decode(data, declared=declared[1].decode("ascii") if declared else None)
    page = render(canonical(decoded.text))
    if not page.text.strip():
        raise ParseError(FailureReason.EMPTY, "the page shows no text")
    return Document(
        text=page.text,
        pages=single_page(page.text),
        sections=page.sections,
        media_type=MediaType.HTML,
        encoding=decoded.encoding,
        warnings=decoded.warnings + hidden_warning(page.hidden),
        parser=PARSER,
        title=page.title,
    )


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a reader of a page sees; `hidden` counts the parts that were left out."""

    text: str
    sections: tuple[Section, ...]
    hidden: int
    title: str | None


def render(markup: str) -> Rendered:
    """Text of a page, which may be empty, and its headings."""
    tree = LexborHTMLParser(markup)
    writer = _Writer()
    if tree.body is not None:
        _walk(tree.body, writer)
    title = tree.css_first("head > title")
    return Rendered(
        "".join(writer.pieces),
        tuple(writer.sections),
        writer.hidden,
        (" ".join(title.text().split()) or None) if title else None,
    )


def hidden_warning(hidden: int) -> tuple[str, ...]:
    """The sentence about parts that were left out, if there are any."""
    return (f"{hidden} hidden parts were left out",) if hidden else ()


@dataclass(slots=True)
class _Row:
    """An open row; `first_piece` is its index in the writer's pieces."""

    first_piece: int
    cells: int = 0
    heads: int = 0


@dataclass(slots=True)
class _Table:
    """An open table, and its first row if all of that names columns."""

    columns: str = ""
    body: int = 0


@dataclass(slots=True)
class _Writer:
    """The text so far, and the gap that the next word will need."""

    pieces: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    length: int = 0
    gap: int = _NOTHING
    rows: list[_Row] = field(default_factory=list)
    tables: list[_Table] = field(default_factory=list)
    inside_head: int = 0
    inside_cell: int = 0
    verbatim: int = 0
    cell_begins: bool = False
    heading: int | None = None  # index in `pieces` where the open heading begins
    hidden: int = 0

    def want(self, gap: int) -> None:
        if self.inside_cell:
            gap = _NOTHING if self.cell_begins else min(gap, _SPACE)
        self.gap = max(self.gap, gap)

    def write(self, text: str) -> None:
        if self.length and self.gap:
            self.pieces.append(_GAPS[self.gap])
            self.length += len(_GAPS[self.gap])
        self.gap = _NOTHING
        self.cell_begins = False
        self.pieces.append(text)
        self.length += len(text)

    def words(self, text: str) -> None:
        """Write running text, its white space as HTML counts it."""
        if self.verbatim and not self.inside_cell:
            if text.strip():
                self.write(text.strip("\n"))
            return
        flowing = _SPACES.sub(" ", text)
        if flowing[:1] == " ":
            self.want(_SPACE)
        if flowing.strip(" "):
            self.write(flowing.strip(" "))
        if flowing[-1:] == " " and self.length:
            self.want(_SPACE)


def _walk(root: LexborNode, writer: _Writer) -> None:
    """Depth first with a stack of our own: pages may nest deeper than Python recurses."""
    stack: list[tuple[LexborNode, bool]] = [(root, False)]
    while stack:
        node, leaving = stack.pop()
        tag = node.tag or ""
        if leaving:
            _leave(tag, writer)
            continue
        if tag == "-text":
            writer.words(node.text_content or "")
            continue
        if tag.startswith(("-", "!")) or tag in _UNSEEN:
            continue
        if _is_hidden(node):
            writer.hidden += 1
            continue
        _enter(tag, writer)
        stack.append((node, True))
        children = list(node.iter(include_text=True))
        stack.extend((child, False) for child in reversed(children))


def _is_hidden(node: LexborNode) -> bool:
    attributes = node.attributes
    return "hidden" in attributes or bool(_HIDING.search((attributes.get("style") or "").lower()))


def _enter(tag: str, writer: _Writer) -> None:
    if tag in _BLOCKS:
        writer.want(_LINE if tag in _TIGHT else _PARAGRAPH)
    match tag:
        case "h1" | "h2" | "h3" | "h4" | "h5" | "h6":
            writer.heading = len(writer.pieces)
        case "br":
            writer.want(_LINE)
        case "pre" | "textarea":
            writer.verbatim += 1
        case "li":
            writer.write("- ")
        case "table":
            writer.tables.append(_Table())
        case "thead":
            writer.inside_head += 1
        case "tr":
            writer.rows.append(_Row(len(writer.pieces)))
        case "td" | "th":
            if writer.rows:
                if writer.rows[-1].cells:
                    writer.write(CELL_SEPARATOR)
                writer.rows[-1].cells += 1
                writer.rows[-1].heads += tag == "th" or writer.inside_head > 0
            writer.inside_cell += 1
            writer.cell_begins = True


def _leave(tag: str, writer: _Writer) -> None:
    match tag:
        case "h1" | "h2" | "h3" | "h4" | "h5" | "h6":
            _end_heading(int(tag[1]), writer)
        case "pre" | "textarea":
            writer.verbatim -= 1
        case "table":
            _end_table(writer.tables.pop(), writer)
        case "thead":
            writer.inside_head -= 1
        case "tr":
            _end_row(writer.rows.pop(), writer)
        case "td" | "th":
            writer.inside_cell -= 1
            writer.cell_begins = False
            writer.gap = _NOTHING if writer.gap == _SPACE else writer.gap
    if tag in _BLOCKS:
        writer.want(_LINE if tag in _TIGHT else _PARAGRAPH)


def _end_row(row: _Row, writer: _Writer) -> None:
    table = writer.tables[-1] if writer.tables else None
    if table and not table.columns and 1 < row.cells == row.heads:
        table.columns = "".join(writer.pieces[row.first_piece :])
        table.body = writer.length + 1


def _end_table(table: _Table, writer: _Writer) -> None:
    if table.columns.strip():
        for section in columns(table.columns, table.body, writer.length):
            insort(writer.sections, section, key=lambda section: section.start)


def _end_heading(level: int, writer: _Writer) -> None:
    if writer.heading is None:
        return
    text = "".join(writer.pieces[writer.heading :])
    title = " ".join(text.split())
    if title:
        start = writer.length - len(text.lstrip())
        writer.sections.append(Section(title, level, start))
    writer.heading = None
