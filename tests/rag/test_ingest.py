import pytest

import ragflash.rag.ingest
from ragflash.rag.points import EMBED_BATCH
from ragflash.rag.records import DocumentState, JobState, Scope
from ragflash_ingest.document import FailureReason, ParseError


class WordCutter:
    fingerprint = "0" * 64

    def encode(self, text):
        return [*map(len, text.split())]


MINE = Scope(frozenset({"mine"}))
LONG = "\n\n".join(f"Paragraph {n} tells of subject{n}. " + "More words. " * 90 for n in range(150))


def ingest(shelf, data: bytes):
    result = shelf.library.add(shelf.scope, shelf.collection, "a.txt", data)
    job = shelf.library.wait(shelf.scope, result.job.id, 60)
    return job, shelf.library.get(shelf.scope, result.document.id)


def test_a_document_becomes_ready_with_its_facts(shelf, monkeypatch):
    monkeypatch.setattr(shelf.library._ingestor, "_cutter", WordCutter)
    job, document = ingest(shelf, b"first page\fsecond page")
    assert job.state is JobState.DONE
    assert document.state is DocumentState.READY
    assert (document.pages, document.characters, document.tokens) == (2, 22, 4)
    assert (document.media_type, document.parser) == ("text/plain", "text 1")
    assert document.chunks == len(shelf.library.chunks(shelf.scope, document.id)) == 1


def test_passages_are_the_text_at_their_offsets(shelf):
    _, document = ingest(shelf, LONG.encode())
    text = shelf.library.document(shelf.scope, document.id).text
    chunks = shelf.library.chunks(shelf.scope, document.id)
    assert len(chunks) > EMBED_BATCH
    assert all(text[chunk.start : chunk.end] == chunk.text for chunk in chunks)


@pytest.mark.parametrize("data", [b" \n\t ", b"\f\f"])
def test_a_file_without_text_fails_with_the_reason(shelf, data):
    job, document = ingest(shelf, data)
    assert (job.state, job.code) == (JobState.FAILED, "document_unreadable")
    assert (document.state, document.reason) == (DocumentState.FAILED, "no_text")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FailureReason.ENCRYPTED, "document_unreadable"),
        (FailureReason.CRASHED, "document_unreadable"),
        (FailureReason.UNSUPPORTED_TYPE, "unsupported_type"),
    ],
)
def test_a_parser_s_refusal_is_told(shelf, reason, code):
    shelf.parser.fault = ParseError(reason, "a sentence about it")
    job, document = ingest(shelf, b"x")
    assert (job.code, job.detail) == (code, "a sentence about it")
    assert document.reason == reason
    assert shelf.library.list(shelf.scope).items == (document,)


def test_an_unforeseen_fault_fails_one_document_only(shelf):
    shelf.parser.fault = KeyError("bug")
    job, document = ingest(shelf, b"x")
    assert (job.state, job.code) == (JobState.FAILED, "internal_error")
    assert document.state is DocumentState.FAILED
    shelf.parser.fault = None
    assert ingest(shelf, b"y")[0].state is JobState.DONE


def test_a_missing_page_makes_it_partial_and_is_named(shelf):
    _, document = ingest(shelf, b"first page\funreadable\fthird page")
    assert document.state is DocumentState.PARTIAL
    assert document.warnings == ("page 2 could not be read: broken",)
    assert shelf.search("third")[0].chunk.document_id == document.id


def test_fewer_vectors_than_passages_never_become_ready(shelf, monkeypatch):
    whole = shelf.embedder.encode_documents
    monkeypatch.setattr(
        shelf.embedder, "encode_documents", lambda texts, progress: whole(texts)[1:]
    )
    job, document = ingest(shelf, b"some words")
    assert (job.state, job.code) == (JobState.FAILED, "model_error")
    assert document.state is DocumentState.FAILED


def test_points_are_counted_before_it_is_ready(shelf, monkeypatch):
    monkeypatch.setattr(ragflash.rag.ingest, "RETRY_PAUSES_S", ())
    monkeypatch.setattr(shelf.library._ingestor._index, "upsert", lambda points: None)
    job, document = ingest(shelf, b"some words")
    assert document.state is DocumentState.FAILED
    assert job.detail == "the vector store holds 0 of 1 passages"


def test_points_that_a_batch_lost_are_noticed_at_once_and_written_again(shelf, monkeypatch):
    monkeypatch.setattr(ragflash.rag.ingest, "RETRY_PAUSES_S", (0.0,))
    index, batches = shelf.library._ingestor._index, []
    whole = index.upsert

    def lose_one_of_the_second(points):
        batches.append([point.chunk_index for point in points])
        whole(points[1:] if len(batches) == 2 else points)

    monkeypatch.setattr(index, "upsert", lose_one_of_the_second)
    job, document = ingest(shelf, LONG.encode())
    assert job.state is JobState.DONE
    assert [batch[0] for batch in batches] == [0, 64, 64, 128, 192]
    assert index.count(shelf.collection, document.id) == document.chunks


def test_a_restart_parses_again_what_was_being_parsed(open_library, parser):
    parser.gate.clear()
    first = open_library()
    result = first.add(MINE, "mine", "a.txt", b"some words")
    assert parser.entered.wait(30)
    first.close()
    parser.gate.set()
    again = open_library()
    assert again.wait(MINE, result.job.id, 30).state is JobState.DONE
    assert again.get(MINE, result.document.id).state is DocumentState.READY


def test_a_restart_embeds_only_what_is_missing(open_library, parser, embedder):
    first = open_library()
    batches = []

    def stop_at_second() -> None:
        batches.append(None)
        if len(batches) == 2:
            first._worker._stopping.set()

    embedder.before_batch = stop_at_second
    result = first.add(MINE, "mine", "a.txt", LONG.encode())
    first._worker._thread.join(60)
    assert first.get(MINE, result.document.id).state is DocumentState.EMBEDDING
    assert first.search(MINE, "subject3") == []
    first.close()

    embedder.before_batch, embedder.encoded = (lambda: None), []
    again = open_library()
    assert again.wait(MINE, result.job.id, 60).state is JobState.DONE
    chunks = again.chunks(MINE, result.document.id)
    assert len(embedder.encoded) == len(chunks) - EMBED_BATCH
    assert parser.parsed == ["a.txt"]
    assert again.search(MINE, "subject3")[0].chunk.document_id == result.document.id


def test_jobs_that_waited_run_after_a_restart_in_order(open_library, parser):
    parser.gate.clear()
    first = open_library()
    results = [first.add(MINE, "mine", f"{n}.txt", f"text {n}".encode()) for n in range(3)]
    first.close()
    parser.gate.set()
    again = open_library()
    for result in results:
        assert again.wait(MINE, result.job.id, 30).state is JobState.DONE
    assert parser.parsed[-3:] == ["0.txt", "1.txt", "2.txt"]
