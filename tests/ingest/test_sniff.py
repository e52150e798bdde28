import gzip

import pytest
from office_files import make_epub, make_ods, make_ole, make_xls, zip_of

from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.sniff import MediaType, sniff


@pytest.mark.parametrize(
    ("data", "name", "kind"),
    [
        (b"%PDF-1.7\n", "report.txt", MediaType.PDF),
        (b"\n%PDF-1.7\n", "x", MediaType.PDF),
        (b"junk\n%PDF-1.7\n", "x.pdf", MediaType.PDF),
        (b"The marker is\n%PDF-1.7\n", "notes.txt", MediaType.TEXT),
        (b"<!-- c -->\n<!DOCTYPE html><p>x", "page.txt", MediaType.HTML),
        ("<html>".encode("utf-16"), "page", MediaType.HTML),
        (b"<p>part of a page", "part.HTML", MediaType.HTML),
        (b"# Title", "README.md", MediaType.MARKDOWN),
        (b"# Title", "README", MediaType.TEXT),
        (b"a,b\n1,2", "table.csv", MediaType.CSV),
        (b"a\tb\n1\t2", "table.tsv", MediaType.TSV),
        (b"Subject: Hi\n\nHello", "mail.eml", MediaType.EMAIL),
        (b"def f(): pass", "f.py", MediaType.CODE),
        (b"def f(): pass", "f.unknown", MediaType.TEXT),
        (zip_of({"[Content_Types].xml": "", "word/document2.xml": ""}), "a.txt", MediaType.DOCX),
        (zip_of({"[Content_Types].xml": "", "ppt/presentation.xml": ""}), "a", MediaType.PPTX),
        (zip_of({"[Content_Types].xml": "", "xl/workbook.bin": ""}), "a.doc", MediaType.XLSX),
        (make_ods([["x"]]), "a.zip", MediaType.ODS),
        (make_epub({"a.xhtml": "x"}), "a", MediaType.EPUB),
        (make_xls([(0, 0, "x")]), "a", MediaType.XLS),
        (b"one NUL\0 does not make it binary", "a.txt", MediaType.TEXT),
        ("Serial: ZX".encode("utf-16-le"), "a.txt", MediaType.TEXT),
        ("保証期間".encode("shift_jis"), "a.txt", MediaType.TEXT),
    ],
)
def test_content_decides_and_the_name_only_among_texts(data, name, kind):
    assert sniff(data, name) is kind


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(60),
        zip_of({"a.pdf": "%PDF-1.7"}),
        make_ole("PowerPoint Document"),
        make_ole("Something"),
        gzip.compress(b"text " * 99, mtime=0),  # processes must agree on the name
        b"{\\rtf1 text}",
        b"%!PS-Adobe-3.0",
        bytes(range(256)),
    ],
)
def test_other_kinds_are_refused_whatever_they_are_called(data):
    with pytest.raises(ParseError) as caught:
        sniff(data, "innocent.txt")
    assert caught.value.reason is FailureReason.UNSUPPORTED_TYPE


def test_nothing_is_empty():
    with pytest.raises(ParseError) as caught:
        sniff(b"", "a.pdf")
    assert caught.value.reason is FailureReason.EMPTY


def test_a_container_cut_short_is_damaged():
    with pytest.raises(ParseError) as caught:
        sniff(b"PK\x03\x04" + bytes(30), "a.docx")
    assert caught.value.reason is FailureReason.CORRUPT
