"""`bench sessions` asks each tier in turn, and finds the document where it should be."""

import itertools
import json
from contextlib import contextmanager

import pytest

from ragflash.bench import sessions
from ragflash.bench.__main__ import main
from ragflash.bench.record import read_series, summarise
from ragflash.errors import EngineError
from tests.bench.test_make_model import write_toy
from tests.engine.harness import toy_engine
from tests.engine.test_file_tier import answer, asked, open_archive
from tests.engine.test_two_forms import ReaderModel
from tests.engine.toys import byte_tokenizer
from tests.sessions.samples import IDENTITY, files_of, flip

SIZES = sessions.Sizes(document_tokens=600, short_tokens=300, answer_tokens=4)


@pytest.fixture
def measure(tmp_path):
    started = itertools.count()

    @contextmanager
    def start():
        next(started)
        with open_archive(tmp_path / "sessions") as own:
            archive = sessions.Switch(own)
            options = {"archive": archive, "identity": IDENTITY}
            with toy_engine(ReaderModel(), byte_tokenizer(), **options) as engine:
                yield sessions.Running(engine.client, own.flush, archive)

    def run():
        made = sessions.measure(start, tmp_path / "sessions", SIZES, lambda *_: None)
        assert next(started) == 1 + 2 * SIZES.restarts
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


def test_what_is_not_kept_is_neither_written_nor_found(tmp_path):
    with open_archive(tmp_path) as own:
        archive = sessions.Switch(own)
        options = {"archive": archive, "identity": IDENTITY}
        with toy_engine(ReaderModel(), byte_tokenizer(), **options) as engine:
            for is_on, tier in ((False, "none"), (True, "device"), (True, "file"), (False, "none")):
                archive.is_on = is_on
                assert answer(engine, asked(300)).tier == tier
                own.flush()
                if tier != "none":
                    engine.store.drop_all()
    assert len(files_of(tmp_path)) == 2


def test_another_answer_ends_the_measurement(measure, monkeypatch):
    restart = sessions._Bench.restart

    def change(self, file, *, is_dropped):
        self.answer = (*self.answer[:-1], self.answer[-1] + 1)
        return restart(self, file, is_dropped=is_dropped)

    monkeypatch.setattr(sessions._Bench, "restart", change)
    with pytest.raises(EngineError, match="was not the one"):
        measure()


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


@pytest.mark.slow
def test_an_engine_alone_measures_a_card(tmp_path, tmp_path_factory, monkeypatch):
    """With few tokens on the processor, as `python -m ragflash.bench sessions` does it."""
    out, model = tmp_path / "out.json", write_toy(tmp_path_factory.mktemp("made") / "toy.gguf")
    given = ["sessions", "--model", model, "--device", "cpu", "--kv", "auto"]
    given += ["--tokens", 300, "--short", 20, "--restarts", 1, "--folder", tmp_path, "--out", out]
    monkeypatch.setattr("sys.argv", ["ragflash.bench", *map(str, given)])
    main()
    result = json.loads(out.read_text())
    assert result["summary"] == json.loads(json.dumps(summarise(read_series(result))))
    assert result["summary"]["first_token_file_dropped_ms"]["n"] == 1
    assert result["parameters"]["reused_tokens"] > 300
    assert 1 <= result["parameters"]["tokens_of_equal_answers"] <= 16
    assert "--tokens 300 --short 20 --restarts 1" in result["command"]
    assert [path for path in tmp_path.iterdir() if path != out] == []
