"""A table that is cut into chunks: each part knows its columns, and nothing else claims them."""

import pytest
from office_files import make_docx, make_epub, make_pptx
from ranges import check_ranges

from ragflash_ingest import wire
from ragflash_ingest.chunk import chunk
from ragflash_ingest.document import Document
from ragflash_ingest.parsers import parse_bytes

ROWS = [[f"sensor {n} of the upper hall", f"{n} degrees at noon"] for n in range(80)]
HEADER = ["Sensor", "Value"]
AFTER = "What follows the table says nothing about sensors. " * 30


def fill_table(table, rows) -> None:
    for row, values in zip(table.rows, rows, strict=True):
        for cell, value in zip(row.cells, values, strict=True):
            cell.text = value


def word(rows) -> bytes:
    def fill(document) -> None:
        document.add_heading("Readings", 1)
        document.add_paragraph("Table 4: what was read")
        fill_table(document.add_table(len(rows), 2), rows)
        document.add_paragraph(AFTER)

    return make_docx(fill)


def slides(rows) -> bytes:
    def fill(show) -> None:
        slide = show.slides.add_slide(show.slide_layouts[5])
        slide.shapes.title.text = "Readings"
        slide.shapes.add_textbox(0, 0, 9, 9).text_frame.text = "Table 4: what was read"
        fill_table(slide.shapes.add_table(len(rows), 2, 0, 0, 9, 9).table, rows)
        slide.shapes.add_textbox(0, 0, 9, 9).text_frame.text = AFTER

    return make_pptx(fill)


def markup(rows, *, head: str = "th") -> str:
    (first, *others) = rows
    cells = "".join(f"<{head}>{cell}</{head}>" for cell in first)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in others)
    return (
        "<h1>Readings</h1><table><caption>Table 4: what was read</caption>"
        f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table><p>{AFTER}</p>"
    )


def source(rows) -> bytes:
    (first, *others) = (" | ".join(row) for row in rows)
    lines = [f"| {first} |", "|---|---|", *(f"| {row} |" for row in others)]
    text = "# Readings\n\nTable 4: what was read\n\n" + "\n".join(lines) + f"\n\n{AFTER}\n"
    return text.encode()


MAKERS = {
    "x.docx": word,
    "x.pptx": slides,
    "x.html": lambda rows: markup(rows).encode(),
    "cells.html": lambda rows: markup(rows, head="td").encode(),
    "x.epub": lambda rows: make_epub({"one.xhtml": f"<html><body>{markup(rows)}</body></html>"}),
    "x.md": source,
}


def read(name: str, rows) -> Document:
    document = parse_bytes(MAKERS[name](rows), name)
    check_ranges(document)
    return document


@pytest.mark.parametrize("name", MAKERS)
def test_every_part_of_a_long_table_knows_its_columns(name):
    document = read(name, [HEADER, *ROWS])
    parts = chunk(document)
    rows = [part for part in parts if part.text.lstrip("| ").startswith("sensor")]
    assert len(rows) >= 2
    for part in rows:
        assert part.section.split(" › ")[-2:] == ["Readings", "Sensor | Value"]
    first, last = parts[0], parts[-1]
    assert "Table 4: what was read" in first.text
    assert "Sensor | Value" in first.text
    assert first.section.split(" › ")[-1] == "Readings"
    assert last.text.startswith("What follows")
    assert last.section.split(" › ")[-1] == "Readings"


@pytest.mark.parametrize("name", MAKERS)
def test_a_table_that_is_not_cut_makes_no_section(name):
    document = read(name, [HEADER, *ROWS[:5]])
    assert [section for section in document.sections if section.end is not None] == []


@pytest.mark.parametrize("name", MAKERS)
def test_columns_survive_storage(name):
    document = read(name, [HEADER, *ROWS])
    (columns,) = (section for section in document.sections if section.end is not None)
    assert (columns.title, columns.end > columns.start) == ("Sensor | Value", True)
    assert wire.from_json(wire.to_json(document)).sections == document.sections


def test_a_table_that_only_lays_a_page_out_names_no_columns():
    inner = markup([HEADER, *ROWS])
    page = f"<table><tr><td>Menu</td><td>{inner}</td></tr><tr><td>{AFTER}</td></tr></table>"
    document = parse_bytes(page.encode(), "x.html")
    assert [s.title for s in document.sections if s.end is not None] == ["Sensor | Value"]


def test_tables_that_follow_each_other_keep_apart():
    second = [["Town", "Mayor"], *([f"town {n} by the river", f"mayor {n}"] for n in range(80))]
    page = markup([HEADER, *ROWS]) + markup(second)
    document = parse_bytes(page.encode(), "x.html")
    for word, columns in (("sensor 40 ", "Sensor | Value"), ("town 40 ", "Town | Mayor")):
        assert document.section_path(document.text.index(word)) == ("Readings", columns)
    assert document.section_path(document.text.index("What follows")) == ("Readings",)
