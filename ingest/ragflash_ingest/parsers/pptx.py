"""Presentations: a slide is a page, its title a section; notes follow what is shown."""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ragflash_ingest.archive import unpack
from ragflash_ingest.document import Document
from ragflash_ingest.parsers.package import embedded_warning, opening
from ragflash_ingest.parsers.writer import TextWriter
from ragflash_ingest.sniff import MediaType

if TYPE_CHECKING:
    from pptx.shapes.base import BaseShape
    from pptx.slide import Slide
    from pptx.table import Table
    from pptx.text.text import TextFrame

PARSER = "pptx 2"

_FURNITURE = {"DATE", "FOOTER", "SLIDE_NUMBER"}
_MAIN_TYPE = re.compile(
    rb"application/vnd\.(?:ms-powerpoint|openxmlformats-officedocument\.presentationml)"
    rb"\.(?:presentation|slideshow|template)(?:\.macroEnabled)?\.main\+xml"
)


def parse(data: bytes) -> Document:
    """Parse a presentation; macros and links are not followed.

    Raises:
        ParseError: `encrypted`, `corrupt`, `too_large`, or `empty`.
    """
    import pptx  # noqa: PLC0415  (half a second that only presentations need)
    from pptx.exc import PythonPptxError  # noqa: PLC0415  (as above)

    archive = unpack(data)
    writer = TextWriter()
    with opening("presentation", PythonPptxError):
        show = pptx.Presentation(archive.repack(_as_presentation))
        for slide in show.slides:
            _write_slide(slide, writer)
        title = show.core_properties.title.strip() or None
    return writer.document(MediaType.PPTX, PARSER, warnings=embedded_warning(archive), title=title)


def _as_presentation(name: str, data: bytes) -> bytes:
    """Let a show, a template or a file with macros pass for a presentation."""
    if name != "[Content_Types].xml":
        return data
    return _MAIN_TYPE.sub(MediaType.PPTX.encode() + b".main+xml", data)


def _write_slide(slide: "Slide", writer: TextWriter) -> None:
    title = slide.shapes.title
    if title is not None:
        writer.heading(_text(title.text_frame), 1)
    for shape in _flat(slide.shapes):
        if title is not None and shape.shape_id == title.shape_id:
            continue
        if shape.has_text_frame and not _is_furniture(shape):
            writer.paragraph(_text(shape.text_frame))  # type: ignore[attr-defined]  # has_text_frame
        elif shape.has_table:
            writer.table(_rows(shape.table))  # type: ignore[attr-defined]  # has_table
    notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
    if notes is not None and (spoken := _text(notes).strip()):
        writer.paragraph(f"Notes: {spoken}")
    writer.end_page()


def _text(frame: "TextFrame") -> str:
    return frame.text.replace("\v", "\n")  # a line break inside a paragraph


def _flat(shapes: "Iterable[BaseShape]") -> "Iterator[BaseShape]":
    """Shapes in the order of the file, which is the order for reading aloud; groups opened."""
    for shape in shapes:
        inner = getattr(shape, "shapes", None)
        if inner is None:
            yield shape
        else:
            yield from _flat(inner)


def _is_furniture(shape: "BaseShape") -> bool:
    return shape.is_placeholder and shape.placeholder_format.type.name in _FURNITURE


def _rows(table: "Table") -> list[list[str]]:
    """Cells by row; a merged cell's text stands in every cell that it covers."""
    rows = [[cell.text for cell in row.cells] for row in table.rows]
    for top, row in enumerate(table.rows):
        for left, cell in enumerate(row.cells):
            if cell.is_merge_origin:
                for covered in rows[top : top + cell.span_height]:
                    part = slice(left, left + cell.span_width)
                    covered[part] = [rows[top][left]] * len(covered[part])
    return rows
