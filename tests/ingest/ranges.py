"""What must hold of every parsed document, whatever its format."""

from ragflash_ingest.chunk import chunk
from ragflash_ingest.document import Document


def check_ranges(document: Document) -> None:
    text = document.text
    rejoined = "\n".join(text[page.start : page.end] for page in document.pages)
    assert rejoined == text
    assert [page.number for page in document.pages] == list(range(1, len(document.pages) + 1))
    starts = [section.start for section in document.sections]
    assert starts == sorted(starts)
    assert all(start <= len(text) for start in starts)
    for part in chunk(document, target_chars=60, max_chars=80, overlap_chars=10):
        assert part.text == text[part.start : part.end]
        first, last = document.pages[part.page_start - 1], document.pages[part.page_end - 1]
        assert first.start <= part.start < part.end <= last.end
