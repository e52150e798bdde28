"""Documents are read beforehand by jobs that wait for idle time, can be ended, and survive."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

from ragflash.engine.cache import CacheTier
from ragflash.engine.request import PrefillProgress
from ragflash.errors import ContextTooLong, EngineError, EngineOverloaded, NotFound
from ragflash.rag import prefill_jobs
from ragflash.rag.library import Library
from ragflash.rag.prefill import EngineReader
from ragflash.rag.records import (
    AskMode,
    DocumentState,
    DuplicatePolicy,
    JobKind,
    JobState,
    Scope,
)
from tests.engine.harness import toy_engine
from tests.engine.toys import ToyModel, TurnTemplate, byte_tokenizer, random_logits
from tests.rag.asking import PUMP, answered
from tests.rag.engines import ScriptedEngine

MINE = Scope(frozenset({"mine"}))


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_tokenizer()
    logits = random_logits(tokenizer.vocab_size, looks_back=8, never=[*range(32)])
    model = ToyModel(logits, vocab_size=tokenizer.vocab_size)
    with toy_engine(model, tokenizer, template=TurnTemplate(), chunk_tokens=64) as running:
        yield running


class Reader:
    """Reads two of three tokens, then waits while `gate` is clear; raises what `faults` holds."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.faults: list[Exception] = []
        self.read_ids: list[str] = []
        self.left = 0

    def check(self, document):
        pass

    async def read(self, document):
        self.read_ids.append(document.id)
        try:
            if self.faults:
                raise self.faults.pop()
            yield PrefillProgress("r", 2, 3)
            self.reached.set()
            while not self.gate.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.005)
            yield PrefillProgress("r", 3, 3)
        finally:
            self.left += 1


@pytest.fixture
def reader():
    return Reader()


@contextmanager
def started(library: Library, reader):
    library.prefills.start(reader)
    try:
        yield library.prefills
    finally:
        library.prefills.close()


def test_the_first_question_finds_all_of_the_document(own_shelf, engine):
    id_ = own_shelf.add(PUMP)
    library = own_shelf.library
    with started(library, EngineReader(library, engine.client)):
        job = library.prefill(own_shelf.scope, id_)
        done = [step.done for step in library.watch(own_shelf.scope, job.id)]
        last = library.wait(own_shelf.scope, job.id, 60)
    assert (last.state, last.kind, last.stage) == (JobState.DONE, JobKind.PREFILL, "reading")
    assert last.done == last.total > len(PUMP)
    assert done == sorted(done)
    answer = answered(own_shelf, engine.client, mode=AskMode.FULL, max_tokens=4)
    assert answer.usage.cached_tokens >= len(PUMP)
    assert (answer.cache_tier, answer.miss_reason) == (CacheTier.DEVICE, None)


def test_an_ask_holds_it_off_between_its_own_requests(shelf):
    shelf.add(PUMP)
    scripted = ScriptedEngine()
    attending = []
    likelihood = scripted.likelihood
    scripted.likelihood = lambda text: attending.append(scripted.attending) or likelihood(text)
    answered(shelf, scripted)
    assert {*attending} == {1}
    assert scripted.attending == 0


def test_a_document_is_prefilling_while_it_is_read_and_can_be_asked(own_shelf, reader):
    id_ = own_shelf.add("first page\funreadable")
    assert own_shelf.library.get(MINE, id_).state is DocumentState.PARTIAL
    with started(own_shelf.library, reader):
        job = own_shelf.library.prefill(MINE, id_)
        assert reader.reached.wait(30)
        record = own_shelf.library.get(MINE, id_)
        assert (record.state, record.state.is_searchable) == (DocumentState.PREFILLING, True)
        assert own_shelf.library.list(MINE).items[0].state is DocumentState.PREFILLING
        assert own_shelf.search("first")
        reader.gate.set()
        assert own_shelf.library.wait(MINE, job.id, 30).state is JobState.DONE
    assert own_shelf.library.get(MINE, id_).state is DocumentState.PARTIAL


def test_a_document_that_waits_or_is_read_has_no_second_job(own_shelf, reader):
    id_ = own_shelf.add(PUMP)
    waiting = own_shelf.library.prefill(MINE, id_)
    assert own_shelf.library.prefill(MINE, id_).id == waiting.id
    with started(own_shelf.library, reader):
        assert reader.reached.wait(30)
        assert own_shelf.library.prefill(MINE, id_).id == waiting.id
        reader.gate.set()
        own_shelf.library.wait(MINE, waiting.id, 30)
        again = own_shelf.library.prefill(MINE, id_)
        assert again.id != waiting.id
        own_shelf.library.wait(MINE, again.id, 30)
    assert reader.read_ids == [id_, id_]


def test_it_waits_until_the_document_can_be_asked(own_shelf, reader):
    reader.gate.set()
    own_shelf.parser.gate.clear()
    library = own_shelf.library
    with started(library, reader):
        added = library.add(MINE, "mine", "a.txt", PUMP.encode(), prefill=True)
        assert added.prefill is not None
        assert own_shelf.parser.entered.wait(30)
        assert library.job(MINE, added.prefill.id).state is JobState.QUEUED
        with pytest.raises(NotFound, match="cannot be read yet"):
            library.prefill(MINE, added.document.id)
        own_shelf.parser.gate.set()
        assert library.wait(MINE, added.job.id, 30).state is JobState.DONE
        assert library.wait(MINE, added.prefill.id, 30).state is JobState.DONE
        again = library.add(
            MINE, "mine", "a.txt", PUMP.encode(), DuplicatePolicy.REUSE, prefill=True
        )
        assert (again.deduplicated, again.job.kind) == (True, JobKind.INGEST)
        assert again.prefill.id != added.prefill.id
        library.wait(MINE, again.prefill.id, 30)


def test_nothing_is_read_of_a_document_that_could_not_be_taken_in(own_shelf, reader):
    own_shelf.parser.fault = ValueError("broken")
    with started(own_shelf.library, reader):
        added = own_shelf.library.add(MINE, "mine", "a.txt", b"words", prefill=True)
        assert own_shelf.library.wait(MINE, added.job.id, 30).state is JobState.FAILED
        assert own_shelf.library.wait(MINE, added.prefill.id, 30).state is JobState.CANCELLED
    assert reader.read_ids == []


def test_a_job_can_be_ended_and_the_document_stays(own_shelf, reader):
    library = own_shelf.library
    id_ = own_shelf.add(PUMP)
    waiting = library.prefill(MINE, id_)
    assert library.cancel(MINE, waiting.id).state is JobState.CANCELLED
    with started(library, reader):
        running = library.prefill(MINE, id_)
        assert reader.reached.wait(30)
        library.cancel(MINE, running.id)
        assert library.wait(MINE, running.id, 30).state is JobState.CANCELLED
        assert reader.left == 1
    assert library.get(MINE, id_).state is DocumentState.READY
    assert library.cancel(MINE, running.id).state is JobState.CANCELLED


def test_ending_it_while_the_document_is_taken_in_leaves_that_alone(own_shelf):
    own_shelf.parser.gate.clear()
    added = own_shelf.library.add(MINE, "mine", "a.txt", PUMP.encode(), prefill=True)
    assert own_shelf.library.cancel(MINE, added.prefill.id).state is JobState.CANCELLED
    own_shelf.parser.gate.set()
    assert own_shelf.library.wait(MINE, added.job.id, 30).state is JobState.DONE
    assert own_shelf.library.get(MINE, added.document.id).state is DocumentState.READY


def test_deleting_a_document_ends_its_reading_first(own_shelf, reader):
    library = own_shelf.library
    id_ = own_shelf.add(PUMP)
    with started(library, reader):
        job = library.prefill(MINE, id_)
        assert reader.reached.wait(30)
        library.delete(MINE, id_)
        assert reader.left == 1
        with pytest.raises(NotFound):
            library.job(MINE, job.id)


def test_a_job_goes_on_at_the_next_start(open_library, reader):
    library = open_library()
    added = library.add(MINE, "mine", "a.txt", PUMP.encode(), prefill=True)
    library.wait(MINE, added.job.id, 30)
    library.prefills.start(reader)
    assert reader.reached.wait(30)
    library.close()
    assert reader.left == 1
    again, library = Reader(), open_library()
    assert library.get(MINE, added.document.id).state is DocumentState.PREFILLING
    again.gate.set()
    with started(library, again):
        assert library.wait(MINE, added.prefill.id, 30).state is JobState.DONE
    assert again.read_ids == [added.document.id]


def test_what_another_try_may_mend_is_tried_again(own_shelf, reader, monkeypatch):
    monkeypatch.setattr(prefill_jobs, "RETRY_PAUSES_S", (0.01, 0.01))
    reader.faults = [EngineOverloaded("full"), EngineOverloaded("full")]
    reader.gate.set()
    id_ = own_shelf.add(PUMP)
    with started(own_shelf.library, reader):
        job = own_shelf.library.prefill(MINE, id_)
        assert own_shelf.library.wait(MINE, job.id, 30).state is JobState.DONE
        reader.faults = [EngineOverloaded("full")] * 3
        job = own_shelf.library.prefill(MINE, id_)
        last = own_shelf.library.wait(MINE, job.id, 30)
    assert (last.state, last.code) == (JobState.FAILED, EngineOverloaded.code)


@pytest.mark.parametrize("fault", [EngineError("broken"), ValueError("a bug")])
def test_what_fails_says_why_and_the_next_document_gets_its_turn(own_shelf, reader, fault):
    reader.gate.set()
    reader.faults = [fault]
    first, second = own_shelf.add(PUMP), own_shelf.add(PUMP + " Also.")
    with started(own_shelf.library, reader):
        jobs = [own_shelf.library.prefill(MINE, id_) for id_ in (first, second)]
        ended = [own_shelf.library.wait(MINE, job.id, 30) for job in jobs]
    assert [job.state for job in ended] == [JobState.FAILED, JobState.DONE]
    assert ended[0].detail
    assert own_shelf.library.get(MINE, first).state is DocumentState.READY


def test_what_cannot_be_asked_cannot_be_read(own_shelf):
    library = own_shelf.library
    id_ = own_shelf.add(PUMP)
    with started(library, EngineReader(library, ScriptedEngine(context_tokens=100))):
        with pytest.raises(ContextTooLong):
            library.prefill(MINE, id_)
        for scope, name in ((MINE, "doc_9"), (Scope(frozenset({"other"})), id_)):
            with pytest.raises(NotFound):
                library.prefill(scope, name)
