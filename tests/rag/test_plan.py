"""Whole documents when they fit; what does not fit is said with numbers."""

import pytest

from ragflash.errors import ContextTooLong, NotFound
from ragflash.rag.library import Page
from ragflash.rag.plan import plan
from ragflash.rag.records import AskMode, AskRequest, DocumentRecord, DocumentState, Scope
from ragflash_ingest.document import Document, DocumentPage
from tests.rag.engines import ScriptedEngine
from tests.rag.ready_documents import ready_document

SCOPE = Scope(frozenset({"mine", "ours"}))


class Shelves:
    """Records in a list, newest first, listed three at a time."""

    def __init__(self, *records: DocumentRecord, text: str = "") -> None:
        self.records = records
        self.text = text
        self.listings = 0

    def get(self, scope, document_id):
        for record in self.records:
            if record.id == document_id and record.collection_id in scope:
                return record
        raise NotFound(f"there is no document {document_id!r}")

    def list(self, scope, *, limit, after=None):
        self.listings += 1
        items = [record for record in self.records if record.collection_id in scope]
        first = 1 + [item.id for item in items].index(after) if after is not None else 0
        size = min(limit, 3)
        return Page(tuple(items[first : first + size]), len(items) > first + size)

    def document(self, scope, document_id):
        self.get(scope, document_id)
        page = DocumentPage(1, None, 0, len(self.text))
        return Document(self.text, (page,), (), "text/plain", None, (), "test")


def record(id_: str, tokens: int = 100, **changes) -> DocumentRecord:
    return ready_document(id_, **{"characters": 400, "tokens": tokens, **changes})


def planned(library: Shelves, engine=None, scope: Scope = SCOPE, **options):
    return plan(library, engine, scope, AskRequest("Why?", **options))


def test_what_fits_is_read_whole():
    chosen = planned(Shelves(record("a")), ScriptedEngine())
    assert (chosen.mode, chosen.context) == (AskMode.FULL, "single")
    assert "4096" in chosen.reason


def test_several_whole_documents_are_a_bundle():
    chosen = planned(Shelves(record("a"), record("b")), ScriptedEngine())
    assert (chosen.mode, chosen.context) == (AskMode.FULL, "bundle")


def test_what_does_not_fit_is_retrieved_from():
    chosen = planned(Shelves(record("a", 5000)), ScriptedEngine())
    assert (chosen.mode, chosen.context) == (AskMode.RETRIEVE, "retrieved")
    assert "4096" in chosen.reason


def test_an_empty_library_is_not_said_to_be_too_long():
    chosen = planned(Shelves(), ScriptedEngine())
    assert (chosen.mode, chosen.reason) == (AskMode.RETRIEVE, "there are no documents")


def test_documents_that_fit_alone_may_not_fit_together():
    library = Shelves(record("a", 2000), record("b", 2000))
    assert planned(library, ScriptedEngine()).mode is AskMode.RETRIEVE
    assert planned(library, ScriptedEngine(), document_ids=("a",)).mode is AskMode.FULL


@pytest.mark.parametrize("tokens", [10, 100_000])
def test_retrieval_is_done_when_asked_for(tokens):
    chosen = planned(Shelves(record("a", tokens)), ScriptedEngine(), mode=AskMode.RETRIEVE)
    assert (chosen.mode, chosen.reason) == (AskMode.RETRIEVE, "asked for")


@pytest.mark.parametrize("mode", [AskMode.AUTO, AskMode.FULL])
def test_without_a_model_nothing_is_read_whole(mode):
    chosen = planned(Shelves(record("a")), None, mode=mode)
    assert (chosen.mode, chosen.reason) == (AskMode.RETRIEVE, "no model is used")


def test_reading_whole_is_done_when_asked_for():
    chosen = planned(Shelves(record("a")), ScriptedEngine(), mode=AskMode.FULL)
    assert (chosen.mode, chosen.reason) == (AskMode.FULL, "asked for")


def test_reading_whole_what_does_not_fit_is_refused_with_numbers():
    with pytest.raises(ContextTooLong) as caught:
        planned(Shelves(record("a", 5000)), ScriptedEngine(), mode=AskMode.FULL)
    assert caught.value.limit_tokens == 4096
    assert caught.value.prompt_tokens > 5000
    assert str(caught.value.prompt_tokens) in str(caught.value)
    assert "4096" in str(caught.value)


def test_room_is_kept_for_the_answer():
    library = Shelves(record("a", 3000))
    assert planned(library, ScriptedEngine(), max_tokens=10).mode is AskMode.FULL
    assert planned(library, ScriptedEngine(), max_tokens=1000).mode is AskMode.RETRIEVE


def test_room_is_kept_for_the_question():
    library, request = Shelves(record("a", 3000)), AskRequest("Why? " * 200)
    assert plan(library, ScriptedEngine(), SCOPE, request).mode is AskMode.RETRIEVE


def test_tokens_that_nobody_has_counted_are_counted():
    short, long = (Shelves(record("a", 0), text="x" * size) for size in (100, 5000))
    assert planned(short, ScriptedEngine()).mode is AskMode.FULL
    assert planned(long, ScriptedEngine()).mode is AskMode.RETRIEVE
    with pytest.raises(ContextTooLong):
        planned(long, ScriptedEngine(), mode=AskMode.FULL)


def test_without_documents_there_is_nothing_to_read_whole():
    chosen = planned(Shelves(), ScriptedEngine())
    assert (chosen.records, chosen.mode, chosen.namespace) == ((), AskMode.RETRIEVE, "")


def test_all_pages_of_the_listing_are_asked():
    library = Shelves(*(record(str(number)) for number in range(8)))
    chosen = planned(library)
    assert [item.id for item in chosen.records] == list("01234567")
    assert library.listings == 3


@pytest.mark.parametrize("state", [s for s in DocumentState if not s.is_searchable])
def test_a_document_that_is_not_ready_is_left_out_or_refused(state):
    library = Shelves(record("a"), record("b", state=state))
    assert [item.id for item in planned(library).records] == ["a"]
    with pytest.raises(NotFound, match=state.value):
        planned(library, document_ids=("a", "b"))


def test_a_partial_document_is_asked():
    library = Shelves(record("a", state=DocumentState.PARTIAL))
    assert [item.id for item in planned(library, document_ids=("a",)).records] == ["a"]


def test_documents_come_in_the_order_asked_and_once():
    library = Shelves(record("a"), record("b"), record("c"))
    chosen = planned(library, document_ids=("c", "a", "c"))
    assert [item.id for item in chosen.records] == ["c", "a"]


def test_a_document_of_another_collection_is_not_found():
    library = Shelves(record("a"), record("b", collection_id="theirs"))
    with pytest.raises(NotFound):
        planned(library, document_ids=("a", "b"))
    assert [item.id for item in planned(library).records] == ["a"]


def test_what_is_cached_is_shared_inside_the_collections_asked_only():
    library = Shelves(record("a"), record("b", collection_id="ours"))
    assert planned(library, document_ids=("a",)).namespace == "mine"
    one, two = (planned(library, document_ids=ids).namespace for ids in (("a", "b"), ("b", "a")))
    assert one == two
    assert one not in {"mine", "ours"}
