import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from pdf_files import make_pdf, text_page

from ragflash_ingest import pool as pool_module
from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.pool import ParseCancelled, ParserPool, parse_bytes

THREE_PAGES = make_pdf([text_page([f"Page {number}"]) for number in (1, 2, 3)])


@pytest.fixture
def children(monkeypatch):
    """Processes that the pool has started, oldest first."""
    started = []
    start = subprocess.Popen

    def record(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(pool_module.subprocess, "Popen", record)
    return started


@pytest.fixture(scope="module")
def shared():
    with ParserPool() as pool:
        yield pool


def test_a_child_gives_what_the_parser_gives(shared, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(THREE_PAGES)
    here = parse_bytes(THREE_PAGES, "x.pdf")
    for source in (THREE_PAGES, path):
        there = shared.parse(source, "x.pdf")
        assert there.text == here.text
        assert there.pages == here.pages
        assert there.parser == here.parser
        assert there.boxes.lines(0, 6) == here.boxes.lines(0, 6)


def test_failures_keep_their_reason_and_the_child(children):
    with ParserPool() as pool:
        for data, reason in ((b"", FailureReason.EMPTY), (b"%PDF-1.4", FailureReason.CORRUPT)):
            with pytest.raises(ParseError) as caught:
                pool.parse(data, "x.pdf")
            assert caught.value.reason is reason
        assert pool.parse(b"fine", "x.txt").text == "fine"
    assert len(children) == 1


def test_progress_comes_through(shared):
    steps = []
    shared.parse(THREE_PAGES, "x.pdf", progress=lambda *step: steps.append(step))
    assert steps == [("pages", 1, 3), ("pages", 2, 3), ("pages", 3, 3)]


def crash(child):
    """Let a child that has not answered yet end as a fault in native code would."""
    os.kill(child.pid, signal.SIGSEGV)
    child.wait()
    return False


def test_a_crash_is_tried_once_more(children):
    with ParserPool() as pool:
        text = pool.parse(
            THREE_PAGES, "x.pdf", cancelled=lambda: len(children) == 1 and crash(children[0])
        ).text
    assert text == "Page 1\nPage 2\nPage 3"
    assert len(children) == 2


def test_a_second_crash_is_named_and_the_pool_lives_on(children):
    with ParserPool() as pool:
        with pytest.raises(ParseError, match="SIGSEGV") as caught:
            pool.parse(THREE_PAGES, "x.pdf", cancelled=lambda: children and crash(children[-1]))
        assert caught.value.reason is FailureReason.CRASHED
        assert pool.parse(b"fine", "x.txt").text == "fine"
    assert len(children) == 3


def test_a_file_that_takes_too_long_is_given_up(children):
    def freeze(_stage, _done, _total):
        os.kill(children[-1].pid, signal.SIGSTOP)

    many_pages = make_pdf([text_page(["A line of some length to read"] * 50)] * 200)
    with ParserPool(timeout_s=0.5) as pool:
        with pytest.raises(ParseError) as caught:
            pool.parse(many_pages, "x.pdf", progress=freeze)
        assert caught.value.reason is FailureReason.TOO_SLOW
        assert children[0].returncode == -signal.SIGKILL


def test_a_file_that_needs_too_much_memory_is_refused():
    with ParserPool(memory_bytes=320 << 20) as pool:
        with pytest.raises(ParseError) as caught:
            pool.parse(b"word " * (12 << 20), "x.txt")
        assert caught.value.reason is FailureReason.OUT_OF_MEMORY
        assert pool.parse(b"fine", "x.txt").text == "fine"


def test_cancelling_kills_the_child(children):
    seen = []

    with ParserPool() as pool:
        with pytest.raises(ParseCancelled):
            pool.parse(
                THREE_PAGES,
                "x.pdf",
                progress=lambda *step: seen.append(step),
                cancelled=lambda: bool(seen),
            )
        assert children[0].returncode == -signal.SIGKILL
        assert pool.parse(b"fine", "x.txt").text == "fine"


def test_children_are_replaced_after_some_documents(children):
    with ParserPool(documents_per_worker=2) as pool:
        for _ in range(3):
            pool.parse(b"fine", "x.txt")
    assert len(children) == 2
    assert all(child.returncode is not None for child in children)


def test_threads_share_the_children(children):
    with ParserPool(workers=2) as pool, ThreadPoolExecutor(6) as threads:
        texts = threads.map(lambda n: pool.parse(f"text {n}".encode(), "x.txt").text, range(12))
        assert list(texts) == [f"text {number}" for number in range(12)]
    assert len(children) <= 2


def test_a_closed_pool_parses_nothing():
    pool = ParserPool()
    pool.close()
    with pytest.raises(ParseCancelled):
        pool.parse(b"x", "x.txt")
