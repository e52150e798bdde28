"""Work can be cancelled wherever it is, and leaves nothing; documents can be deleted likewise."""

from collections.abc import Callable

import pytest

from ragflash.errors import NotFound, VectorStoreUnavailable
from ragflash.rag import ingest, points
from ragflash.rag.disk import Disk
from ragflash.rag.library import AddResult, Library, LibraryConfig
from ragflash.rag.records import DocumentState, JobState, Scope
from ragflash_ingest.document import FailureReason, ParseError
from tests.rag.conftest import TextParser

MINE = Scope(frozenset({"mine"}))
TEXT = "\f".join(f"Page {n} tells of subject{n}. " + "Many words fill it. " * 60 for n in range(3))

# Where a job is stopped: the owner of a method of which the `at`-th call does it, before or after.
STAGES = {
    "reading": ("parser", "parse", 1, False),
    "read": ("parser", "parse", 1, True),
    "cutting": ("ingest", "indexed_text", 2, False),
    "storing the text": ("disk", "move", 1, True),
    "embedding": ("embedder", "encode_documents", 1, False),
    "embedding more": ("embedder", "encode_documents", 2, True),
    "storing points": ("index", "upsert", 1, True),
    "storing the last points": ("index", "upsert", 2, True),
    "flushing": ("index", "flush", 1, True),
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(points, "EMBED_BATCH", 2)
    monkeypatch.setattr(ingest, "RETRY_PAUSES_S", (3600.0,))


def owner_of(library: Library, parser: TextParser, name: str) -> object:
    return {
        "parser": parser,
        "ingest": ingest,
        "disk": Disk,
        "embedder": library._embedder,
        "index": library._eraser._index,
    }[name]


def add_held(library: Library, parser: TextParser) -> AddResult:
    """Add the document, and have the work on it wait for the parser's gate."""
    parser.gate.clear()
    return library.add(MINE, "mine", "a.txt", TEXT.encode())


def assert_nothing_is_left(library: Library, tmp_path, *, documents: int) -> None:
    assert library.search(MINE, "subject1") == []
    for document in library.list(MINE).items:
        library._worker.leave(document.id)  # a job has ended before its points are gone
    assert library._eraser._index.documents() == set()
    assert len(library.list(MINE).items) == documents
    assert library.health().worker_alive
    embedder = library._embedder
    library.close()
    found = Library.reconcile(LibraryConfig(tmp_path / "data"), embedder, dry_run=True)
    assert found.is_clean, found


@pytest.mark.parametrize("stage", STAGES)
def test_a_job_is_cancelled_at_every_stage(library, parser, monkeypatch, tmp_path, stage):
    part, method, at, after = STAGES[stage]
    added = add_held(library, parser)
    owner, calls = owner_of(library, parser, part), []
    whole: Callable = getattr(owner, method)

    def cancelling(*args, **options):
        calls.append(None)
        result = whole(*args, **options) if after else None
        if len(calls) == at:
            library.cancel(MINE, added.job.id)
        return result if after else whole(*args, **options)

    if part != "parser":
        monkeypatch.setattr(owner, method, cancelling)
        parser.gate.set()
    elif after:
        monkeypatch.setattr(parser, "parsed", CancellingList(library, added.job.id))
        parser.gate.set()
    else:
        assert parser.entered.wait(30)
        library.cancel(MINE, added.job.id)
    job = library.wait(MINE, added.job.id, 30)
    assert (job.state, job.code) == (JobState.CANCELLED, None)
    document = library.get(MINE, added.document.id)
    assert (document.state, document.reason) == (DocumentState.FAILED, "cancelled")
    assert library.chunks(MINE, document.id) == []
    parser.gate.set()
    assert_nothing_is_left(library, tmp_path, documents=1)


class CancellingList(list[str]):
    """Takes note of what was read, and cancels the job that it was read for."""

    def __init__(self, library: Library, job_id: str) -> None:
        super().__init__()
        self.library, self.job_id = library, job_id

    def append(self, name: str) -> None:
        super().append(name)
        self.library.cancel(MINE, self.job_id)


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_job_that_rests_after_a_fault_is_ended_at_once(
    library, parser, monkeypatch, tmp_path, end
):
    added = rest(library, parser, monkeypatch)
    assert library.job(MINE, added.job.id).state is JobState.QUEUED
    if end == "cancel":
        assert library.cancel(MINE, added.job.id).state is JobState.CANCELLED
        assert library.get(MINE, added.document.id).reason == "cancelled"
    else:
        library.delete(MINE, added.document.id)
    assert_nothing_is_left(library, tmp_path, documents=int(end == "cancel"))


def rest(library: Library, parser: TextParser, monkeypatch) -> AddResult:
    """Have the work on a document rest after a fault of the vector store, some points stored."""

    def refuse() -> None:
        raise VectorStoreUnavailable("the vector store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(library._eraser._index, "flush", refuse)
        added = library.add(MINE, "mine", "a.txt", TEXT.encode())
        seen = library.watch(MINE, added.job.id)
        assert next(job for job in seen if job.retry_at_ms).code == "store_unavailable"
    return added


def put(library: Library, parser: TextParser, monkeypatch, state: str) -> AddResult:
    """Add a document and bring it into a state."""
    if state == "resting":
        return rest(library, parser, monkeypatch)
    if state == "failed":
        parser.fault = ParseError(FailureReason.ENCRYPTED, "it needs a password")
    if state == "partial":
        return ended(library, library.add(MINE, "mine", "a.txt", b"words\funreadable"))
    if state in {"ready", "failed"}:
        return ended(library, library.add(MINE, "mine", "a.txt", TEXT.encode()))
    if state == "queued":
        add_held(library, parser)
        return library.add(MINE, "mine", "b.txt", b"other words")
    added = add_held(library, parser)
    assert parser.entered.wait(30)
    if state == "cancelled":
        library.cancel(MINE, added.job.id)
        return ended(library, added)
    return added  # being parsed


def ended(library: Library, added: AddResult) -> AddResult:
    assert library.wait(MINE, added.job.id, 30).state.is_final
    return added


@pytest.mark.parametrize(
    ("state", "document_state"),
    [
        ("queued", DocumentState.QUEUED),
        ("parsing", DocumentState.PARSING),
        ("resting", DocumentState.EMBEDDING),
        ("ready", DocumentState.READY),
        ("partial", DocumentState.PARTIAL),
        ("failed", DocumentState.FAILED),
        ("cancelled", DocumentState.FAILED),
    ],
)
def test_a_document_is_deleted_in_every_state(library, parser, monkeypatch, state, document_state):
    added = put(library, parser, monkeypatch, state)
    assert library.get(MINE, added.document.id).state is document_state
    digest = added.document.sha256
    library.delete(MINE, added.document.id)
    for read in (library.get, library.chunks, library.content_path):
        with pytest.raises(NotFound):
            read(MINE, added.document.id)
    with pytest.raises(NotFound):
        library.job(MINE, added.job.id)
    assert digest not in library._files.digests()
    assert ("mine", added.document.id) not in library._eraser._index.documents()
    parser.gate.set()
    parser.fault = None
    later = library.add(MINE, "mine", "c.txt", b"later words")
    assert library.wait(MINE, later.job.id, 30).state is JobState.DONE
