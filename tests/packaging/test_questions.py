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
from ragflash.samples import LANGUAGE_SAMPLES, SAMPLES, sample_path


def read_questions(name: str) -> list[dict]:
    return [json.loads(line) for line in sample_path(name).read_text(encoding="utf-8").splitlines()]


QUESTIONS = read_questions("questions.jsonl")
LANGUAGE_QUESTIONS = read_questions("languages/questions.jsonl")
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
    samples = (*SAMPLES, *LANGUAGE_SAMPLES)
    return {sample.name: read_pages(sample_path(sample.name)) for sample in samples}


def test_samples_are_the_files_that_were_published():
    for sample in (*SAMPLES, *LANGUAGE_SAMPLES):
        data = sample_path(sample.name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == sample.sha256


def test_samples_name_where_they_come_from():
    licences = sample_path("questions.jsonl").with_name("LICENSES.md").read_text(encoding="utf-8")
    samples = (*SAMPLES, *LANGUAGE_SAMPLES)
    assert [sample.name for sample in samples if f"## {sample.name}" not in licences] == []


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


def test_counts_of_other_languages():
    counts = Counter((row["language"], row["answerable"]) for row in LANGUAGE_QUESTIONS)
    assert counts == {
        ("de", True): 8,
        ("de", False): 2,
        ("fa", True): 8,
        ("fa", False): 2,
        ("ja", True): 9,
        ("ja", False): 2,
        ("zh", True): 8,
        ("zh", False): 2,
    }
    assert len({row["question"] for row in LANGUAGE_QUESTIONS}) == len(LANGUAGE_QUESTIONS)


@pytest.mark.parametrize("row", LANGUAGE_QUESTIONS, ids=lambda row: row["question"])
def test_a_quote_in_another_language_is_on_its_page_and_on_no_other(row, pages):
    assert set(row) == {"document", "language", "question", "answerable", "pages", "quote"}
    assert row["document"].startswith(f"{row['language']}-")
    if not row["answerable"]:
        assert (row["pages"], row["quote"]) == ([], None)
        return
    quote = "".join(row["quote"].split())  # lines of Japanese end inside words
    texts = ["".join(page.split()) for page in pages[f"languages/{row['document']}"]]
    assert [i for i, text in enumerate(texts, start=1) if quote in text] == row["pages"]


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row["question"])
def test_quote_is_on_its_page_and_on_no_other(row, pages):
    assert set(row) == {"document", "question", "answerable", "pages", "quote"}
    if not row["answerable"]:
        assert (row["pages"], row["quote"]) == ([], None)
        return
    quote = squeeze(row["quote"])
    found = [i for i, page in enumerate(pages[row["document"]], start=1) if quote in page]
    assert found == row["pages"]
