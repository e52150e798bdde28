"""The built-in questions have their shape, and every quote is where they say it is."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from selectolax.lexbor import LexborHTMLParser

from ragflash.errors import NotFound
from ragflash.samples import SAMPLES, sample_path

QUESTIONS = [
    json.loads(line)
    for line in sample_path("questions.jsonl").read_text(encoding="utf-8").splitlines()
]
# In a process of its own: a parser of PDF is no part of the test process.
READ_PDF = """
import json, sys, pypdfium2
pages = pypdfium2.PdfDocument(sys.argv[1])
json.dump([page.get_textpage().get_text_range() for page in pages], sys.stdout)
"""


def squeeze(text: str) -> str:
    """Join words broken at a line's end (U+FFFE in PDF text) and even out white space."""
    return " ".join(text.replace("\ufffe", "").split())


def read_pages(path: Path) -> list[str]:
    if path.suffix == ".pdf":
        command = [sys.executable, "-c", READ_PDF, str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return [squeeze(page) for page in json.loads(result.stdout)]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        body = LexborHTMLParser(text).body
        assert body is not None
        text = body.text()
    return [squeeze(text)]


@pytest.fixture(scope="module")
def pages() -> dict[str, list[str]]:
    return {sample.name: read_pages(sample_path(sample.name)) for sample in SAMPLES}


def test_samples_are_the_files_that_were_published():
    for sample in SAMPLES:
        data = sample_path(sample.name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == sample.sha256


def test_samples_name_where_they_come_from():
    licences = sample_path("questions.jsonl").with_name("LICENSES.md").read_text(encoding="utf-8")
    assert [sample.name for sample in SAMPLES if f"## {sample.name}" not in licences] == []


@pytest.mark.parametrize("name", ["none.pdf", "../errors.py", ""])
def test_only_samples_have_a_path(name):
    with pytest.raises(NotFound, match=r"debian-policy\.pdf"):
        sample_path(name)


def test_counts():
    counts = Counter((row["document"], row["answerable"]) for row in QUESTIONS)
    assert counts == {
        ("debian-policy.pdf", True): 14,
        ("debian-policy.pdf", False): 2,
        ("bug-reporting.txt", True): 5,
        ("bug-reporting.txt", False): 2,
        ("sqlite-wal.html", True): 5,
        ("sqlite-wal.html", False): 2,
    }
    assert len({row["question"] for row in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row["question"])
def test_quote_is_on_its_page_and_on_no_other(row, pages):
    assert set(row) == {"document", "question", "answerable", "pages", "quote"}
    if not row["answerable"]:
        assert (row["pages"], row["quote"]) == ([], None)
        return
    quote = squeeze(row["quote"])
    found = [i for i, page in enumerate(pages[row["document"]], start=1) if quote in page]
    assert found == row["pages"]
