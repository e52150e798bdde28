"""What lies outside a scope answers exactly as what does not exist."""

from dataclasses import replace

import pytest

from ragflash.errors import NotFound
from ragflash.rag.records import JobState, Scope, SearchMode

MINE = Scope(frozenset({"mine"}))
THEIRS = Scope(frozenset({"theirs"}))
BOTH = Scope(frozenset({"mine", "theirs"}))
NONE: Scope = Scope(frozenset())

READS = {
    "get": lambda library, scope, document_id: library.get(scope, document_id),
    "document": lambda library, scope, document_id: library.document(scope, document_id),
    "chunks": lambda library, scope, document_id: library.chunks(scope, document_id),
    "content_path": lambda library, scope, document_id: library.content_path(scope, document_id),
    "delete": lambda library, scope, document_id: library.delete(scope, document_id),
    "list after": lambda library, scope, document_id: library.list(scope, after=document_id),
    "search in": lambda library, scope, document_id: library.search(
        scope, "warranty", document_ids=[document_id]
    ),
}


@pytest.fixture(scope="module")
def two(module_shelf):
    """One document in each of two collections, by collection."""
    return {
        name: replace(module_shelf, collection=name).add(f"The warranty of {name} lasts two years.")
        for name in ("mine", "theirs")
    }


@pytest.fixture
def library(module_shelf):
    return module_shelf.library


def refusal(read, library, scope, id_: str) -> str:
    with pytest.raises(NotFound) as caught:
        read(library, scope, id_)
    return str(caught.value).replace(id_, "ID")


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("scope", [MINE, NONE], ids=["mine", "none"])
def test_a_foreign_document_looks_absent(library, two, name, scope):
    foreign = refusal(READS[name], library, scope, two["theirs"])
    assert foreign == refusal(READS[name], library, scope, "doc_absent")
    assert library.get(THEIRS, two["theirs"]).id == two["theirs"]


def test_a_foreign_document_in_memory_looks_absent(library, two):
    library.document(THEIRS, two["theirs"])
    assert "ID" in refusal(READS["document"], library, MINE, two["theirs"])


def test_a_listing_holds_the_scope_only(library, two):
    assert [item.id for item in library.list(MINE).items] == [two["mine"]]
    assert {item.id for item in library.list(BOTH).items} == set(two.values())
    assert library.list(NONE).items == ()


@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
def test_a_search_finds_the_scope_only(library, two, mode):
    def found(scope: Scope) -> set[str]:
        hits = library.search(scope, "warranty years", mode=SearchMode(mode))
        return {hit.chunk.document_id for hit in hits}

    assert found(MINE) == {two["mine"]}
    assert found(THEIRS) == {two["theirs"]}
    assert found(BOTH) == set(two.values())
    assert found(NONE) == set()


def test_word_weights_of_a_search_come_from_the_scope(shelf):
    shelf.add("alpha beta")
    before = shelf.search("alpha")[0].sparse_score
    other = replace(shelf, collection="others")
    for number in range(5):
        other.add(f"alpha {number}")
    assert shelf.search("alpha")[0].sparse_score == before


def test_a_foreign_job_looks_absent(library, two):
    job = library.add(THEIRS, "theirs", "a.txt", b"The warranty of theirs lasts two years.").job
    for read in (
        lambda library, scope, id_: library.job(scope, id_),
        lambda library, scope, id_: library.cancel(scope, id_),
        lambda library, scope, id_: library.wait(scope, id_, 0),
        lambda library, scope, id_: next(library.watch(scope, id_)),
    ):
        assert refusal(read, library, MINE, job.id) == refusal(read, library, MINE, "job_absent")
    assert library.job(THEIRS, job.id).state is JobState.DONE


def test_nothing_is_added_outside_the_scope(library):
    for collection in ("empty", ""):
        with pytest.raises(NotFound, match=f"there is no collection '{collection}'"):
            library.add(MINE, collection, "a.txt", b"words")
    assert library.list(Scope(frozenset({"empty", ""}))).items == ()
