"""A thousand files of every kind pass through one library, and its memory stays as it is."""

import gc
import re
from pathlib import Path

import pytest

from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import DocumentState, Scope
from tests.ingest.office_files import make_docx, make_epub, make_ole, make_pptx, make_xlsx
from tests.ingest.pdf_files import IMAGE, make_pdf, text_page
from tests.rag.conftest import HashEmbedder

MINE = Scope(frozenset({"mine"}))
FILES = 1000
WARM = 400  # libraries, caches and arenas have their size by then
ALLOWED_GROWTH_BYTES = 24 << 20
STATUS = Path("/proc/self/status")
ROWS = [["Name", "Town"], *([f"name {n}", f"town {n}"] for n in range(60))]


def slides(show) -> None:
    slide = show.slides.add_slide(show.slide_layouts[5])
    slide.shapes.title.text = "A title"


def sheet(book) -> None:
    for at, row in enumerate(ROWS):
        (book.get_worksheet_by_name("S") or book.add_worksheet("S")).write_row(at, 0, row)


LINES = [f"Line {n} says something about subject{n}." for n in range(40)]
MARKUP = f"<h1>Title</h1>{''.join(f'<p>{line}</p>' for line in LINES)}"
KINDS: dict[str, bytes] = {
    "a.pdf": make_pdf([text_page(LINES)] * 5),
    "scan.pdf": make_pdf([IMAGE]),
    "locked.pdf": make_pdf([text_page(LINES)], passwords=("u", "o")),
    "cut.pdf": make_pdf([text_page(LINES)])[:300],
    "a.docx": make_docx(lambda word: [word.add_paragraph(line) for line in LINES]),
    "a.pptx": make_pptx(slides),
    "a.xlsx": make_xlsx(sheet),
    "locked.xlsx": make_ole("EncryptedPackage"),
    "a.csv": "\n".join(";".join(row) for row in ROWS).encode(),
    "a.epub": make_epub({"one.xhtml": f"<html><body>{MARKUP}</body></html>"}),
    "a.html": MARKUP.encode(),
    "a.md": "\n\n".join(["# Title", *LINES]).encode(),
    "a.txt": "\n".join(LINES).encode("utf-16"),
    "a.py": "\n\n\n".join(f"def name_{n}():\n    return {n}" for n in range(40)).encode(),
    "a.eml": b"Subject: A mail\nContent-Type: text/plain\n\n" + "\n".join(LINES).encode(),
    "a.bin": b"\x7fELF" + bytes(500),
}


def resident_bytes() -> int:
    gc.collect()
    found = re.search(r"^VmRSS:\s+(\d+) kB", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_stays_flat_over_a_thousand_mixed_files(tmp_path, record_testsuite_property):
    library = Library.open(LibraryConfig(tmp_path / "data"), HashEmbedder())
    kinds, before, states = list(KINDS.items()), 0, set()
    try:
        for number in range(FILES):
            name, data = kinds[number % len(kinds)]
            added = library.add(MINE, "mine", f"{number} {name}", data)
            assert library.wait(MINE, added.job.id, 120).state.is_final
            states.add((name, library.get(MINE, added.document.id).state))
            library.delete(MINE, added.document.id)
            if number == WARM:
                before = resident_bytes()
        growth = resident_bytes() - before
    finally:
        library.close()
    record_testsuite_property("growth_bytes", growth)
    assert growth < ALLOWED_GROWTH_BYTES
    readable = {name for name, state in states if state is DocumentState.READY}
    unreadable = {"scan.pdf", "locked.pdf", "cut.pdf", "locked.xlsx", "a.bin"}
    assert readable == set(KINDS) - unreadable
