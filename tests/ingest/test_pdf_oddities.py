"""PDFs whose text is not what it seems: unexplained fonts, shapes of letters, broken pictures."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from pdf_files import IMAGE, _assemble, make_pdf, text_page

from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.parsers import parse_bytes
from ragflash_ingest.pool import ParserPool

# Letters as filled shapes, as a page that was turned into outlines has them.
OUTLINES = b"0 g 100 300 m 120 340 l 140 300 l f 150 300 30 40 re f"


def stream(body: bytes, entries: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(body), entries, body)


def one_page(
    text: bytes,
    *,
    mapping: bytes = b"",
    picture: bytes | None = None,
    tagged: bool = False,
) -> bytes:
    """A page with a line of text.

    Args:
        mapping: Body of the font's /ToUnicode, in the operators of ISO 32000-1 §9.10.3.
        picture: An image object that the page shows.
        tagged: Whether the file says that it was made with its structure.
    """
    cmap = b"begincmap 1 begincodespacerange <00> <ff> endcodespacerange %s endcmap" % mapping
    shown = b"BT /F1 12 Tf 1 0 0 1 72 700 Tm (%s) Tj ET" % text
    shown += b" q 90 0 0 90 72 500 cm /Im1 Do Q" if picture else b""
    resources = b"/Font << /F1 3 0 R >>" + (b" /XObject << /Im1 5 0 R >>" if picture else b"")
    mark = b" /MarkInfo << /Marked true >>" if tagged else b""
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R%s >>" % mark,
        2: b"<< /Type /Pages /Kids [10 0 R] /Count 1 >>",
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 4 0 R >>",
        4: stream(cmap),
        10: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << %s >> "
        b"/Contents 11 0 R >>" % resources,
        11: stream(shown),
    }
    if picture:
        objects[5] = picture
    return _assemble(objects, "/Root 1 0 R")


def test_text_that_its_fonts_do_not_explain_is_marked_by_page():
    document = parse_bytes(
        one_page(b"Seems fine", mapping=b"1 beginbfrange <20> <7e> <e020> endbfrange"), "x.pdf"
    )
    assert document.warnings == ("page 1 has text that its fonts do not explain",)


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("content", [IMAGE, OUTLINES], ids=["scan", "outlines"])
def test_what_shows_no_text_is_never_an_empty_document(content, tagged):
    data = make_pdf([content])
    if tagged:
        mark = b"/Type /Catalog /MarkInfo << /Marked true >>"
        data = data.replace(b"/Type /Catalog", mark)
    with pytest.raises(ParseError, match="no page has text") as caught:
        parse_bytes(data, "x.pdf")
    assert caught.value.reason is FailureReason.NO_TEXT


def test_outlines_among_text_are_told_by_page():
    document = parse_bytes(make_pdf([text_page(["Words"]), OUTLINES]), "x.pdf")
    assert document.text.strip() == "Words"
    assert document.warnings == ("page 2 shows something but has no text (a scan?)",)


@pytest.mark.parametrize("target", [b"0000", b"0001", b"001F", b"0008"])
def test_no_control_character_comes_out_of_a_page(target):
    mapping = b"1 beginbfchar <65> <%s> endbfchar" % target
    document = parse_bytes(one_page(b"Hello there, seven words", mapping=mapping), "x.pdf")
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", document.text)
    assert "seven".replace("e", "") in document.text.replace("\ufffd", "")
    assert len(document.boxes.boxes) == len(document.text)


@pytest.mark.parametrize(
    "entries",
    [
        b"/Width (wide) /Height -5 /BitsPerComponent /Foo",
        b"/Width 9 /Height 9 /ColorSpace [/ICCBased 99 0 R] /BitsPerComponent 8",
        b"/Width 9 /Height 9 /Filter [/JPXDecode /Nope] /DecodeParms 7",
        b"/Width 1000000000 /Height 1000000000 /ColorSpace /DeviceRGB /BitsPerComponent 16",
    ],
    ids=["types", "reference", "filters", "size"],
)
def test_a_broken_picture_loses_no_text(entries):
    picture = stream(b"0123456789", b"/Type /XObject /Subtype /Image " + entries)
    assert parse_bytes(one_page(b"Seven words", picture=picture), "x.pdf").text == "Seven words"


def test_many_threads_get_what_one_gets():
    files = [
        make_pdf([text_page([f"File {n} page {page}"] * 9) for page in range(6)]) for n in range(8)
    ]
    expected = [parse_bytes(data, "x.pdf").text for data in files]
    assert all(expected)
    with ParserPool(workers=2) as pool, ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            assert [*threads.map(lambda data: pool.parse(data, "x.pdf").text, files)] == expected
