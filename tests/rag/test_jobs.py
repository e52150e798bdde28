import threading

import pytest

from ragflash.errors import NotFound
from ragflash.rag.index_edge import QdrantEdgeIndex
from ragflash.rag.jobs import NEXT_STATES
from ragflash.rag.records import DocumentState, JobState, Scope

MINE = Scope(frozenset({"mine"}))


def test_wait_returns_when_the_job_is_final(library, parser):
    parser.gate.clear()
    result = library.add(MINE, "mine", "a.txt", b"words")
    assert result.job.state is JobState.QUEUED
    waiting = library.wait(MINE, result.job.id, timeout_s=0.0)
    assert not waiting.state.is_final
    parser.gate.set()
    assert library.wait(MINE, result.job.id, 30).state is JobState.DONE


def test_watch_tells_stages_and_counts_in_order(library, parser, embedder):
    parser.gate.clear()
    result = library.add(MINE, "mine", "a.txt", b"one\ftwo\fthree")
    watched = library.watch(MINE, result.job.id)
    seen = [next(watched)]
    parser.gate.set()
    seen += list(watched)
    assert seen[-1].state is JobState.DONE
    assert (seen[-1].done, seen[-1].total) == (1, 1)
    steps = [(["", "parsing", "embedding"].index(job.stage), job.done) for job in seen]
    assert steps == sorted(steps)


def test_a_waiting_job_is_cancelled_at_once(library, parser):
    parser.gate.clear()
    first = library.add(MINE, "mine", "a.txt", b"one")
    second = library.add(MINE, "mine", "b.txt", b"two")
    assert library.cancel(MINE, second.job.id).state is JobState.CANCELLED
    document = library.get(MINE, second.document.id)
    assert (document.state, document.reason) == (DocumentState.FAILED, "cancelled")
    parser.gate.set()
    assert library.wait(MINE, first.job.id, 30).state is JobState.DONE
    assert parser.parsed == ["a.txt"]


def test_a_parsing_job_is_cancelled(library, parser):
    parser.gate.clear()
    result = library.add(MINE, "mine", "a.txt", b"one")
    assert parser.entered.wait(30)
    library.cancel(MINE, result.job.id)
    assert library.wait(MINE, result.job.id, 30).state is JobState.CANCELLED
    assert library.get(MINE, result.document.id).reason == "cancelled"


def test_an_embedding_job_is_cancelled_between_batches(library, embedder):
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go.wait(30)

    embedder.before_batch = hold
    result = library.add(MINE, "mine", "a.txt", b"one")
    assert entered.wait(30)
    library.cancel(MINE, result.job.id)
    go.set()
    assert library.wait(MINE, result.job.id, 30).state is JobState.CANCELLED
    document = library.get(MINE, result.document.id)
    assert (document.state, document.chunks) == (DocumentState.FAILED, 0)
    assert library.search(MINE, "one") == []


def test_cancelling_what_is_done_changes_nothing(library, add):
    document_id = add("words")
    job = library.add(MINE, "mine", "a.txt", b"words").job
    assert library.cancel(MINE, job.id).state is JobState.DONE
    assert library.get(MINE, document_id).state is DocumentState.READY


def test_a_watcher_of_a_deleted_document_sees_the_end(library, parser):
    parser.gate.clear()
    result = library.add(MINE, "mine", "a.txt", b"one")
    watched = library.watch(MINE, result.job.id)
    next(watched)
    library.delete(MINE, result.document.id)
    assert list(watched)[-1].state is JobState.CANCELLED
    with pytest.raises(NotFound):
        library.job(MINE, result.job.id)


def test_final_states_have_no_way_on():
    assert {state for state, nexts in NEXT_STATES.items() if not nexts} == {
        state for state in JobState if state.is_final
    }


def test_without_a_job_the_store_is_tidied(open_library, monkeypatch):
    tidied = threading.Event()
    monkeypatch.setattr(QdrantEdgeIndex, "tidy", lambda index: tidied.set())
    open_library()
    assert tidied.wait(30)
