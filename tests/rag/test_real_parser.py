"""Real files through the pool of parser processes, and what becomes of them when it goes wrong."""

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from ragflash.rag.library import Library
from ragflash.rag.records import DocumentState, JobRecord, JobState, Scope
from ragflash_ingest import pool as pool_module
from ragflash_ingest.pool import ParserPool
from tests.ingest.pdf_files import make_pdf, text_page

MINE = Scope(frozenset({"mine"}))
PAGES = 12
BOOK = make_pdf([text_page([f"Page {n} tells of subject{n}."] * 30) for n in range(1, PAGES + 1)])
MEMORY_BYTES = 320 << 20


class Sabotaged(ParserPool):
    """Does something to the child that reads a certain file, when the first page is read."""

    def __init__(self, **limits: float) -> None:
        super().__init__(**limits)
        self.children: list[subprocess.Popen] = []
        self.victim, self.harm = "", signal.SIGKILL

    def parse(self, source, name, *, progress=None, cancelled=None):
        def harmful(*step) -> None:
            if name == self.victim:
                os.kill(self.children[-1].pid, self.harm)
            progress(*step)

        return super().parse(source, name, progress=harmful, cancelled=cancelled)


@pytest.fixture
def open_with(open_library, monkeypatch) -> Callable[..., tuple[Library, Sabotaged]]:
    def open_one(**limits: float) -> tuple[Library, Sabotaged]:
        pool = Sabotaged(**limits)
        start = subprocess.Popen

        def record(*args, **kwargs):
            pool.children.append(start(*args, **kwargs))
            return pool.children[-1]

        monkeypatch.setattr(pool_module.subprocess, "Popen", record)
        return open_library(parser=pool, max_bytes=1 << 30), pool

    return open_one


def ended(library: Library, data: bytes, name: str) -> tuple[JobRecord, DocumentState, str | None]:
    added = library.add(MINE, "mine", name, data)
    job = library.wait(MINE, added.job.id, 60)
    document = library.get(MINE, added.document.id)
    return job, document.state, document.reason


def test_progress_counts_every_page_and_then_every_passage(open_with):
    library, _ = open_with()
    added = library.add(MINE, "mine", "book.pdf", BOOK)
    seen = list(library.watch(MINE, added.job.id))
    chunks = library.get(MINE, added.document.id).chunks
    steps = {stage: [j for j in seen if j.stage == stage] for stage in ("parsing", "embedding")}
    for stage, total in (("parsing", PAGES), ("embedding", chunks)):
        counts = [(job.done, job.total) for job in steps[stage] if job.total]
        assert counts == sorted(counts)
        assert counts[-1] == (total, total)
        assert {of for _, of in counts} == {total}
    assert [job.stage for job in seen if job.stage] == sorted(
        (job.stage for job in seen if job.stage), key=["parsing", "embedding"].index
    )


def test_a_file_that_kills_its_parser_twice_fails_alone_and_says_how(open_with):
    library, pool = open_with()
    pool.victim, pool.harm = "bad.pdf", signal.SIGSEGV
    job, state, reason = ended(library, BOOK, "bad.pdf")
    assert (job.state, state, reason) == (JobState.FAILED, DocumentState.FAILED, "crashed")
    assert "SIGSEGV" in job.detail
    assert len(pool.children) == 2
    assert ended(library, BOOK + b"\n", "good.pdf")[1] is DocumentState.READY
    assert library.health().worker_alive


def test_a_file_whose_parser_stands_still_is_given_up_after_its_time(open_with):
    library, pool = open_with(timeout_s=0.5)
    pool.victim, pool.harm = "bad.pdf", signal.SIGSTOP
    job, state, reason = ended(library, BOOK, "bad.pdf")
    assert (state, reason) == (DocumentState.FAILED, "too_slow")
    assert "longer to parse than is allowed" in job.detail
    assert pool.children[0].returncode == -signal.SIGKILL
    assert ended(library, b"good words", "good.txt")[1] is DocumentState.READY


def test_a_file_that_needs_more_memory_than_a_parser_has_fails_alone(open_with):
    library, _ = open_with(memory_bytes=MEMORY_BYTES)
    job, state, reason = ended(library, b"word " * (12 << 20), "bad.txt")
    assert (state, reason) == (DocumentState.FAILED, "out_of_memory")
    assert "more memory than a parser may use" in job.detail
    assert ended(library, b"good words", "good.txt")[1] is DocumentState.READY


def test_cancelling_ends_the_parser_in_the_middle_of_a_file(open_with):
    library, pool = open_with()
    pool.victim, pool.harm = "slow.pdf", signal.SIGSTOP
    added = library.add(MINE, "mine", "slow.pdf", BOOK)
    next(job for job in library.watch(MINE, added.job.id) if job.done)
    library.cancel(MINE, added.job.id)
    assert library.wait(MINE, added.job.id, 30).state is JobState.CANCELLED
    assert pool.children[0].returncode == -signal.SIGKILL
    assert library.get(MINE, added.document.id).reason == "cancelled"
    assert ended(library, b"good words", "good.txt")[1] is DocumentState.READY
