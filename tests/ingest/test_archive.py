import io
import struct
import tracemalloc
import zipfile
import zlib

import pytest
from office_files import make_docx, make_epub, make_xlsx, members_of, zip_of

from ragflash_ingest import archive
from ragflash_ingest.archive import list_names, unpack
from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.parsers import parse_bytes
from ragflash_ingest.pool import ParserPool

DOCX = make_docx(lambda word: word.add_paragraph("Body"))


def failure(data, name="x"):
    with pytest.raises(ParseError) as caught:
        parse_bytes(data, name)
    return caught.value.reason


def with_stated(data, *, size, crc=None):
    """Archive of one member whose headers give another size, and perhaps another checksum."""
    changed = bytearray(data)
    for header, crc_at in ((0, 14), (data.index(b"PK\x01\x02"), 16)):
        struct.pack_into("<I", changed, header + crc_at + 8, size)
        if crc is not None:
            struct.pack_into("<I", changed, header + crc_at, crc)
    return bytes(changed)


def test_libraries_get_what_was_counted():
    members = members_of(DOCX)
    repacked = members_of(unpack(DOCX).repack().getvalue())
    for name, content in repacked.items():
        assert content in {members[name], b""}
    assert repacked["word/document.xml"] == members["word/document.xml"]


@pytest.mark.parametrize(
    "make",
    [
        lambda blank: zip_of(members_of(DOCX) | {"word/document.xml": blank}),
        lambda blank: zip_of(members_of(DOCX) | {"word/comments.xml": blank}),
        lambda blank: zip_of(
            members_of(make_xlsx(lambda book: book.add_worksheet())) | {"xl/a.xml": blank}
        ),
        lambda blank: make_epub({"a.xhtml": blank}),
    ],
)
def test_a_bomb_is_refused_before_it_fills_memory(make):
    data = make(b" " * (24 << 20))
    tracemalloc.start()
    try:
        assert failure(data) is FailureReason.TOO_LARGE
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * archive.FREE_BYTES


def test_the_name_of_a_bomb_does_not_matter():
    data = zip_of(members_of(DOCX) | {"word/document.xml": b" " * (20 << 20)})
    for name in ("a.doc", "a.txt", "a.pdf", ""):
        assert failure(data, name) is FailureReason.TOO_LARGE


def test_the_budget_is_for_all_members_together(monkeypatch):
    monkeypatch.setattr(archive, "FREE_BYTES", 1000)
    monkeypatch.setattr(archive, "MAX_RATIO", 1)
    parts = {f"{number}.xml": b" " * 700 for number in range(8)}
    assert len(zip_of(parts)) < sum(map(len, parts.values()))
    with pytest.raises(ParseError) as caught:
        unpack(zip_of(parts))
    assert caught.value.reason is FailureReason.TOO_LARGE


def test_much_repetition_in_a_small_file_is_no_bomb():
    long = "<p>again and again</p>" * 40_000
    data = make_epub({"a.xhtml": f"<html><body>{long}</body></html>"})
    assert len(long) > archive.MAX_RATIO * len(data) / 2
    assert parse_bytes(data, "x").text.count("again and again") == 40_000


@pytest.mark.parametrize("size", [10, 3_000_000_000])
def test_a_stated_size_is_not_believed(size):
    blank = b" " * (20 << 20)
    data = with_stated(zip_of({"a.xml": blank}), size=size)
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        assert opened.getinfo("a.xml").file_size == size
    with pytest.raises(ParseError) as caught:
        unpack(data)
    expected = FailureReason.CORRUPT if size == 10 else FailureReason.TOO_LARGE
    assert caught.value.reason is expected


def test_nobody_sees_more_than_was_counted():
    content = b"0123456789" + b" " * (20 << 20)
    data = with_stated(zip_of({"a.xml": content}), size=10, crc=zlib.crc32(content[:10]))
    assert unpack(data).texts == {"a.xml": content[:10]}


def test_the_number_of_entries_is_counted_before_they_are_read(monkeypatch):
    monkeypatch.setattr(archive, "MAX_ENTRIES", 20)
    data = bytearray(zip_of({f"{number}.xml": b"" for number in range(21)}))
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<HH", data, end + 8, 1, 1)  # the directory says: one
    for read in (list_names, unpack):
        with pytest.raises(ParseError) as caught:
            read(bytes(data))
        assert caught.value.reason is FailureReason.TOO_LARGE


def test_pictures_and_embedded_files_are_never_inflated():
    bomb = b"\0" * (40 << 20)
    members = members_of(DOCX)
    inner = zip_of({"deep.zip": zip_of({"x.txt": "NESTED"})})
    data = zip_of({**members, "word/media/a.png": bomb, "word/embeddings/b.bin": inner})
    document = parse_bytes(data, "x")
    assert document.text == "Body"
    assert document.warnings == ("1 embedded files were left out",)
    assert unpack(data).embedded() == ("word/embeddings/b.bin",)


def test_an_archive_of_documents_is_refused():
    data = zip_of({"a.pdf": b"%PDF-1.7", "b.zip": zip_of({"c.pdf": b"%PDF-1.7"})})
    for name in ("a.zip", "a.docx", "a.pdf"):
        with pytest.raises(ParseError, match="send the files that are in it") as caught:
            parse_bytes(data, name)
        assert caught.value.reason is FailureReason.UNSUPPORTED_TYPE


def test_protected_members_are_named_as_such():
    data = bytearray(DOCX)
    start = data.index(b"PK\x01\x02")
    data[start + 8] |= 1
    assert failure(bytes(data)) is FailureReason.ENCRYPTED


def test_other_compressions_are_refused():
    data = zip_of(members_of(DOCX), zipfile.ZIP_LZMA)
    assert failure(data) is FailureReason.CORRUPT


def test_a_name_that_stands_for_two_members_is_refused():
    target = io.BytesIO(DOCX)
    with zipfile.ZipFile(target, "a") as opened, pytest.warns(UserWarning, match="Duplicate name"):
        opened.writestr("word/document.xml", b"<x/>")
    assert failure(target.getvalue()) is FailureReason.CORRUPT


def test_the_parsers_process_survives_a_bomb():
    bomb = zip_of(members_of(DOCX) | {"word/document.xml": b" " * (24 << 20)})
    with ParserPool() as pool:
        with pytest.raises(ParseError) as caught:
            pool.parse(bomb, "x.docx")
        assert caught.value.reason is FailureReason.TOO_LARGE
        assert pool.parse(DOCX, "x.docx").text == "Body"
