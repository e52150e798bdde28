"""`bench ask` times a document that is read against one that has to be read."""

import asyncio
from types import MappingProxyType, SimpleNamespace

import pytest

from ragflash.bench import ask
from ragflash.bench.record import summarise
from ragflash.engine.request import Timings
from ragflash.errors import EngineError
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import AskTimings
from tests.api.fakes import INFO
from tests.rag.conftest import HashEmbedder, TextParser


class ForgetfulEngine:
    """Knows which documents are cached, and never again caches one that was dropped."""

    def __init__(self):
        self.cached = set()
        self.dropped = set()

    async def drop_source(self, source_id):
        assert source_id.startswith("doc_")
        self.cached.discard(source_id)
        self.dropped.add(source_id)
        return 1

    def info(self):
        return INFO


class TimedAnswerer:
    first_token_ms = MappingProxyType({True: 2.0, False: 100.0})

    def __init__(self, library, client):
        self.client = client

    async def answer(self, scope, request):
        await asyncio.sleep(0)
        cached = request.document_ids[0] in self.client.cached
        self.client.cached |= {*request.document_ids} - self.client.dropped
        computed = 10 if cached else 1000
        engine = Timings(0.0, computed, 1000 - computed, float(computed), 4, 40.0, 1.0, 0, 0, 1)
        first_ms = self.first_token_ms[cached]
        timings = AskTimings(0.0, 0.0, first_ms and first_ms + 50, first_ms, engine)
        usage = SimpleNamespace(prompt_tokens=1000, cached_tokens=1000 - computed)
        return SimpleNamespace(question=request.question, usage=usage, timings=timings)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    path = tmp_path / "guide.txt"
    path.write_text("Records are kept for seven years. They are then destroyed by the keeper.")
    monkeypatch.setattr(ask, "Answerer", TimedAnswerer)
    library = Library.open(
        LibraryConfig(data_dir=tmp_path / "data"), HashEmbedder(), parser=TextParser()
    )
    engine = ForgetfulEngine()
    yield lambda: ask.measure(library, engine, path, "How long?", 7, lambda *_: None)
    library.close()


def test_every_pair_is_one_reading_of_each_kind(measure):
    measurement = measure()
    summary = summarise(measurement.series)
    assert summary["first_token_reused_ms"]["max"] == 2.0
    assert summary["first_token_cold_ms"]["min"] == 100.0
    assert summary["first_token_reused_ms"]["ratio"]["median"] == 0.02
    assert summary["answer_cold_ms"]["n"] == summary["answer_reused_ms"]["n"] == 7
    assert summary["read_tokens_per_s"]["median"] == 1000.0
    assert measurement.parameters["reused_tokens"] == 990
    assert measurement.model == {"file": INFO.model, "sha256": INFO.model_hash}


def test_an_answer_without_a_first_token_is_refused(measure, monkeypatch):
    monkeypatch.setattr(TimedAnswerer, "first_token_ms", {True: None, False: None})
    with pytest.raises(EngineError, match="nothing to time"):
        measure()
