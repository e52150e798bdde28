"""Small files of every kind that is read, and broken ones, as many different ones as are wanted."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.ingest.office_files import (
    make_docx,
    make_epub,
    make_ods,
    make_pptx,
    make_xls,
    make_xlsx,
    zip_of,
)
from tests.ingest.pdf_files import make_pdf, text_page

WORDS = [
    "archive",
    "keeper",
    "record",
    "ledger",
    "season",
    "harbour",
    "winter",
    "letter",
    "bridge",
    "copper",
]


@dataclass(frozen=True)
class File:
    """`reason` is why it fails; `None` for one that can be read."""

    name: str
    content: bytes
    reason: str | None = None


def sentences(chance: random.Random, count: int = 8) -> list[str]:
    return [" ".join(chance.choices(WORDS, k=9)).capitalize() + "." for _ in range(count)]


def _docx(lines: list[str]) -> bytes:
    def fill(word) -> None:
        word.add_heading(lines[0], 1)
        for line in lines[1:]:
            word.add_paragraph(line)

    return make_docx(fill)


def _pptx(lines: list[str]) -> bytes:
    def fill(show) -> None:
        slide = show.slides.add_slide(show.slide_layouts[1])
        slide.shapes.title.text = lines[0]
        slide.placeholders[1].text = "\n".join(lines[1:])

    return make_pptx(fill)


def _xlsx(lines: list[str]) -> bytes:
    def fill(book) -> None:
        sheet = book.add_worksheet("Lines")
        for row, line in enumerate(lines):
            sheet.write_row(row, 0, line.split())

    return make_xlsx(fill)


def _mail(lines: list[str]) -> bytes:
    head = "From: keeper@example.org\r\nTo: archive@example.org\r\nSubject: " + lines[0]
    head += "\r\nMIME-Version: 1.0\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
    return (head + "\r\n".join(lines[1:])).encode()


def _html(lines: list[str]) -> bytes:
    body = "".join(f"<p>{line}</p>" for line in lines[1:])
    return f"<html><body><h1>{lines[0]}</h1>{body}</body></html>".encode()


def _code(lines: list[str]) -> bytes:
    return "".join(f'def line_{at}():\n    """{x}"""\n' for at, x in enumerate(lines)).encode()


GOOD: dict[str, Callable[[list[str]], bytes]] = {
    "txt": lambda lines: "\n".join(lines).encode(),
    "md": lambda lines: ("# " + "\n\n".join(lines)).encode(),
    "html": _html,
    "csv": lambda lines: "\n".join(line.replace(" ", ",") for line in lines).encode(),
    "py": _code,
    "eml": _mail,
    "pdf": lambda lines: make_pdf([text_page(lines)] * 2),
    "docx": _docx,
    "pptx": _pptx,
    "xlsx": _xlsx,
    "xls": lambda lines: make_xls([(row, 0, line) for row, line in enumerate(lines)]),
    "ods": lambda lines: make_ods([line.split() for line in lines]),
    "epub": lambda lines: make_epub({"one.xhtml": f"<html><body><p>{lines}</p></body></html>"}),
}
BROKEN: dict[str, tuple[str, Callable[[list[str]], bytes]]] = {
    "cut.pdf": ("corrupt", lambda lines: make_pdf([text_page(lines)])[:150] + lines[0].encode()),
    "locked.pdf": (
        "encrypted",
        lambda lines: make_pdf([text_page(lines)], passwords=("user", "owner")),
    ),
    "blank.pdf": ("no_text", lambda lines: make_pdf([b"% " + lines[0].encode()])),
    "cut.docx": ("corrupt", lambda lines: _docx(lines)[:3000] + lines[0].encode()),
    "cut.xlsx": ("corrupt", lambda lines: _xlsx(lines)[:-200] + lines[0].encode()),
    "other.zip": ("unsupported_type", lambda lines: zip_of({"a.txt": lines[0]})),
    "white.txt": ("empty", lambda lines: b" " * int(lines[0].removeprefix("File ")[:-1])),
    "noise.bin": (
        "unsupported_type",
        lambda lines: b"\x7fELF" + bytes(range(256)) * 4 + lines[0].encode(),
    ),
}


def make(count: int, seed: int) -> Iterator[File]:
    """Make that many different files, one in ten broken."""
    chance = random.Random(seed)
    good, broken = list(GOOD), list(BROKEN)
    for number in range(count):
        lines = [f"File {number}.", *sentences(chance)]
        if number % 10 == 9:
            name = broken[number // 10 % len(broken)]
            reason, write = BROKEN[name]
            yield File(f"{number}-{name}", write(lines), reason)
        else:
            ending = good[number % len(good)]
            yield File(f"{number}.{ending}", GOOD[ending](lines))
