"""Characters and boxes are those that PDFium's binding gives, one by one."""

import numpy as np
import pypdfium2 as pdfium
import pytest
from pdf_files import make_pdf, text_page

from ragflash.samples import sample_path
from ragflash_ingest.parsers import pdf_text
from ragflash_ingest.parsers.pdf_text import _decode, read_page


@pytest.fixture(scope="module")
def manual():
    with pdfium.PdfDocument(sample_path("debian-policy.pdf")) as document:
        yield document


def assert_same(one, other):
    assert one.text == other.text
    assert np.array_equal(one.boxes, other.boxes, equal_nan=True)


@pytest.mark.parametrize("index", [0, 40, 120])
def test_boxes_are_those_of_the_binding(manual, index):
    page = manual[index]
    read, textpage = read_page(page), page.get_textpage()
    left, _, _, top = page.get_bbox()
    wanted = []
    for at in range(textpage.count_chars()):
        char = textpage.get_text_range(at, 1)
        x0, y0, x1, y1 = textpage.get_charbox(at, loose=True)
        if char and char not in "\r\n\ufffe" and x1 > x0:
            wanted.append((char, x0 - left, top - y1, x1 - left, top - y0))
    given = [
        (char, *box)
        for char, box in zip(read.text, read.boxes.tolist(), strict=True)
        if box[2] > box[0] and char != "-"
    ]
    wanted = [row for row in wanted if row[0] != "-"]
    assert "".join(row[0] for row in given) == "".join(row[0] for row in wanted)
    rows = [np.array([row[1:] for row in these]) for these in (given, wanted)]
    assert np.allclose(*rows, atol=1e-3)


def test_blocks_do_not_show(manual, monkeypatch):
    whole = read_page(manual[40])
    monkeypatch.setattr(pdf_text, "_BLOCK", 7)
    assert_same(read_page(manual[40]), whole)


def test_characters_without_a_code_do_not_shift_the_others(manual, monkeypatch):
    whole = read_page(manual[40])
    monkeypatch.setattr(pdf_text, "_get_text", lambda *arguments: 1)
    assert_same(read_page(manual[40]), whole)


def test_an_empty_page_has_no_characters():
    with pdfium.PdfDocument(make_pdf([b"", text_page(["x"])])) as document:
        assert read_page(document[0]).text == ""
        assert read_page(document[0]).boxes.shape == (0, 4)


@pytest.mark.parametrize(
    ("codes", "text", "origins"),
    [
        ([0x61, 0x0D, 0x0A, 0x62], "a\nb", [0, -1, 3]),
        ([0x61, 0x02, 0x62], "a-\nb", [0, 1, -1, 2]),
        ([0x61, 0xFFFE], "a-\n", [0, 1, -1]),
        ([0x09, 0x00, 0x7F, 0x1B, 0x20], "\t ", [0, 4]),
        ([0xD83D, 0xDE00, 0x61], "😀a", [0, 2]),
        ([0x1F600, 0x61], "😀a", [0, 1]),
        ([0xD83D], "", []),
        ([0x61, 0xD83D, 0x62, 0xDE00], "ab", [0, 2]),
    ],
)
def test_codes_become_text(codes, text, origins):
    chars, found = _decode(np.array(codes, np.uint32))
    assert "".join(map(chr, chars)) == text
    assert found.tolist() == origins
