import gzip

import pytest

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
        (b"a,b\n1,2", "table.csv", MediaType.TEXT),
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
        b"PK\x03\x04" + bytes(30),
        gzip.compress(b"text " * 99),
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
