import pytest
from office_files import make_epub, members_of, zip_of
from ranges import check_ranges

from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.parsers import parse_bytes
from ragflash_ingest.sniff import MediaType

XHTML = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head>'
ONE = f"{XHTML}<body><h1>The sea</h1><p>It <i/>was calm.</p></body></html>"
TWO = (
    f"{XHTML}<body>\n <h1>The land</h1><h2>A hill</h2>"
    "<p>It was <b>high</b>.<br/>Very.</p></body></html>"
)


def protected(path):
    reference = f'<EncryptedData><CipherReference URI="{path}"/></EncryptedData>'
    return {"META-INF/encryption.xml": f"<encryption>{reference}</encryption>"}


def test_chapters_come_in_the_order_of_the_spine():
    data = make_epub({"b two.xhtml": TWO, "a.xhtml": ONE}, order=["a.xhtml", "b two.xhtml"])
    document = parse_bytes(data, "book")
    assert document.text == ("The sea\n\nIt was calm.\n\nThe land\n\nA hill\n\nIt was high.\nVery.")
    assert document.media_type == MediaType.EPUB
    assert document.title == "A Book"
    assert [(s.title, s.level) for s in document.sections] == [
        ("The sea", 1),
        ("The land", 1),
        ("A hill", 2),
    ]
    for section in document.sections:
        assert document.text.startswith(section.title, section.start)
    assert len(document.pages) == 1
    check_ranges(document)


def test_chapters_name_their_encoding():
    page = '<?xml version="1.0" encoding="iso-8859-7"?><html><body><p>Θάλασσα</p></body></html>'
    document = parse_bytes(make_epub({"a.xhtml": page.encode("iso-8859-7")}), "x")
    assert document.text == "Θάλασσα"


def test_a_missing_chapter_is_told():
    data = make_epub({"a.xhtml": ONE, "gone.xhtml": ""})
    members = members_of(data)
    del members["OPS/gone.xhtml"]
    document = parse_bytes(zip_of(members), "x")
    assert document.text.startswith("The sea")
    assert document.warnings == ("the file lacks its chapter OPS/gone.xhtml",)


def test_encrypted_fonts_do_not_matter():
    extra = protected("OPS/font.otf")
    assert parse_bytes(make_epub({"a.xhtml": ONE}, extra=extra), "x").text.startswith("The sea")


@pytest.fixture
def leak(tmp_path):
    """A document type that names a file outside."""
    secret = tmp_path / "secret.txt"
    secret.write_text("TOP SECRET")
    return f'<!DOCTYPE x [<!ENTITY leak SYSTEM "{secret.as_uri()}">]>'


def test_no_chapter_reads_an_entity_from_outside(leak):
    page = f"{leak}<html><body><p>Shown &leak;</p></body></html>"
    text = parse_bytes(make_epub({"a.xhtml": page}), "x").text
    assert "Shown" in text
    assert "SECRET" not in text


def test_no_package_reads_an_entity_from_outside(leak):
    members = members_of(make_epub({"a.xhtml": ONE}))
    old = b"<dc:title>A Book"
    members["OPS/book.opf"] = leak.encode() + members["OPS/book.opf"].replace(old, old + b"&leak;")
    with pytest.raises(ParseError) as caught:
        parse_bytes(zip_of(members), "x")
    assert caught.value.reason is FailureReason.CORRUPT
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            make_epub({"a.xhtml": ONE}, extra=protected("OPS/a.xhtml")),
            FailureReason.ENCRYPTED,
        ),
        (make_epub({"a.xhtml": "<html><body/></html>"}), FailureReason.EMPTY),
        (zip_of({"META-INF/container.xml": "<x"}), FailureReason.CORRUPT),
        (zip_of({"META-INF/container.xml": "<container/>"}), FailureReason.CORRUPT),
    ],
)
def test_what_cannot_be_read_says_why(data, reason):
    with pytest.raises(ParseError) as caught:
        parse_bytes(data, "x.epub")
    assert caught.value.reason is reason
