"""Office files and books, written by the libraries themselves or by hand."""

import io
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence

import docx
import pptx
import xlsxwriter

ODS_TYPE = "application/vnd.oasis.opendocument.spreadsheet"


def saved(write: Callable[[io.BytesIO], object]) -> bytes:
    target = io.BytesIO()
    write(target)
    return target.getvalue()


def make_docx(fill: Callable[..., object]) -> bytes:
    word = docx.Document()
    fill(word)
    return saved(word.save)


def make_pptx(fill: Callable[..., object]) -> bytes:
    show = pptx.Presentation()
    fill(show)
    return saved(show.save)


def make_xlsx(fill: Callable[..., object]) -> bytes:
    def write(target: io.BytesIO) -> None:
        with xlsxwriter.Workbook(target) as book:
            fill(book)

    return saved(write)


def zip_of(members: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    def write(target: io.BytesIO) -> None:
        with zipfile.ZipFile(target, "w", method) as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    return saved(write)


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def changed(data: bytes, **changes: Callable[[bytes], bytes]) -> bytes:
    """An archive with the members changed whose names end in the keywords, "_" read as "."."""
    members = members_of(data)
    for ending, change in changes.items():
        (name,) = (name for name in members if name.endswith("/" + ending.replace("_", ".")))
        members[name] = change(members[name])
    return zip_of(members)


def make_ods(rows: Sequence[Sequence[str]], manifest: str = "") -> bytes:
    names = "urn:oasis:names:tc:opendocument:xmlns"
    table = ""
    for row in rows:
        cells = (f"<text:p>{cell}</text:p></table:table-cell>" for cell in row)
        opening = '<table:table-cell office:value-type="string">'
        table += f"<table:table-row>{''.join(opening + cell for cell in cells)}</table:table-row>"
    content = (
        f'<office:document-content xmlns:office="{names}:office:1.0"'
        f' xmlns:table="{names}:table:1.0" xmlns:text="{names}:text:1.0"><office:body>'
        f'<office:spreadsheet><table:table table:name="Leaves">{table}</table:table>'
        "</office:spreadsheet></office:body></office:document-content>"
    )
    root = f'<m:manifest xmlns:m="{names}:manifest:1.0">{manifest}</m:manifest>'
    members = {"mimetype": ODS_TYPE, "META-INF/manifest.xml": root, "content.xml": content}
    return zip_of(members, zipfile.ZIP_STORED)


def make_ole(stream_name: str, stream: bytes = b"") -> bytes:
    """Compound file of one stream ([MS-CFB]); sectors: allocation, directory, then the stream."""
    stream = stream.ljust(4096, b"\0")  # shorter ones would be stored in another way
    count = -(-len(stream) // 512)
    chain = [0xFFFFFFFD, 0xFFFFFFFE, *range(3, 2 + count), 0xFFFFFFFE]
    table = struct.pack("<128I", *chain, *[0xFFFFFFFF] * (128 - len(chain)))

    def entry(name: str, kind: int, child: int, start: int, size: int) -> bytes:
        raw = (name + "\0").encode("utf-16-le")
        head = raw.ljust(64, b"\0") + struct.pack(
            "<HBB3I", len(raw), kind, 1, *[2**32 - 1] * 2, child
        )
        return head + bytes(36) + struct.pack("<IQ", start, size)

    directory = entry("Root Entry", 5, 1, 0xFFFFFFFE, 0)
    directory += entry(stream_name, 2, 0xFFFFFFFF, 2, len(stream))
    header = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    header += struct.pack("<5H6x", 0x3E, 3, 0xFFFE, 9, 6)
    header += struct.pack("<9I", 0, 1, 1, 0, 4096, 0xFFFFFFFE, 0, 0xFFFFFFFE, 0)
    header += struct.pack("<109I", 0, *[0xFFFFFFFF] * 108)
    return header + table + directory.ljust(512, b"\0") + stream.ljust(512 * count, b"\0")


def make_xls(cells: Sequence[tuple[int, int, str]], *, encrypted: bool = False) -> bytes:
    """BIFF8 workbook ([MS-XLS]) with one sheet of labels."""

    def record(kind: int, body: bytes) -> bytes:
        return struct.pack("<HH", kind, len(body)) + body

    start = struct.pack("<HHHHII", 0x600, 0, 0, 0, 0, 0)
    opening = record(0x809, start[:2] + b"\x05\0" + start[4:])
    opening += record(0x2F, struct.pack("<3H", 1, 1, 1) + bytes(48)) if encrypted else b""
    end = record(0xA, b"")
    length = len(opening) + 4 + 13 + len(end)
    sheet = record(0x85, struct.pack("<IBBBB", length, 0, 0, 5, 0) + b"Sheet")
    labels = b"".join(
        record(0x204, struct.pack("<4HB", row, column, 0, len(text), 0) + text.encode("ascii"))
        for row, column, text in cells
    )
    book = opening + sheet + end + record(0x809, start[:2] + b"\x10\0" + start[4:]) + labels + end
    return make_ole("Workbook", book)


def make_epub(
    chapters: dict[str, str | bytes],
    *,
    order: Sequence[str] = (),
    extra: dict[str, str | bytes] | None = None,
) -> bytes:
    items = "".join(
        f'<item id="c{at}" href="{name.replace(" ", "%20")}" media-type="application/xhtml+xml"/>'
        for at, name in enumerate(chapters)
    )
    names = list(chapters)
    spine = "".join(f'<itemref idref="c{names.index(name)}"/>' for name in order or names)
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata'
        ' xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>A Book</dc:title></metadata>'
        f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OPS/book.opf"/></rootfiles></container>'
    )
    members = {"mimetype": "application/epub+zip", "META-INF/container.xml": container}
    texts = {f"OPS/{name}": text for name, text in chapters.items()}
    return zip_of({**members, "OPS/book.opf": package, **texts, **(extra or {})})
