"""`bench sessions` asks each tier in turn, and finds the document where it should be."""

import itertools
from contextlib import contextmanager

import pytest

from ragflash.bench import sessions
from ragflash.bench.record import summarise
from ragflash.errors import EngineError
from ragflash.sessions import FolderArchive, SessionFolder
from tests.engine.harness import toy_engine
from tests.engine.test_two_forms import ReaderModel
from tests.engine.toys import byte_tokenizer
from tests.sessions.samples import IDENTITY, LIMITS, flip

SIZES = sessions.Sizes(document_tokens=600, short_tokens=300, pairs=7)


@pytest.fixture
def measure(tmp_path):
    tokenizer, started = byte_tokenizer(), itertools.count()

    @contextmanager
    def start(keeps: bool):
        next(started)
        if not keeps:
            with toy_engine(ReaderModel(), tokenizer) as engine:
                yield sessions.Running(engine.client, lambda: None)
            return
        folder = SessionFolder.open(tmp_path / "sessions", LIMITS)
        archive = FolderArchive(folder)
        try:
            options = {"archive": archive, "identity": IDENTITY}
            with toy_engine(ReaderModel(), tokenizer, **options) as engine:
                yield sessions.Running(engine.client, archive.flush)
        finally:
            archive.close()
            folder.close()

    def run():
        made = sessions.measure(start, tmp_path / "sessions", SIZES, lambda *_: None)
        assert next(started) == 1 + 2 * SIZES.pairs + 2
        return made

    return run


def test_every_tier_is_asked_and_what_is_reused_is_the_document(measure):
    made = measure()
    summary = summarise(made.series)
    for name in ("first_token_memory_ms", "first_token_file_ms", "first_token_file_dropped_ms"):
        assert summary[name]["n"] == 7
    assert summary["first_token_unread_ms"]["n"] == 1
    assert summary["restore_ms"]["ratio"]["to"] == "restore_bound_ms"
    assert summary["unread_archived_ms"]["ratio"]["to"] == "unread_plain_ms"
    assert summary["restore_gb_s"]["min"] > 0
    assert 600 <= made.parameters["reused_tokens"] < made.parameters["prompt_tokens"]
    assert made.parameters["file_bytes"] > 0


def test_a_document_that_is_not_where_it_should_be_ends_the_measurement(measure, monkeypatch):
    restart = sessions._Bench.restart

    def lose(self, file, *, is_dropped):
        flip(file, file.stat().st_size // 2, 1)
        return restart(self, file, is_dropped=is_dropped)

    monkeypatch.setattr(sessions._Bench, "restart", lose)
    with pytest.raises(EngineError, match="was in none"):
        measure()


def test_a_file_leaves_the_page_cache_where_the_system_can_tell(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    assert sessions.drop_pages(file) in {True, False}
    assert sessions.read_gb_s(file) > 0
