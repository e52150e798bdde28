"""Libraries on a Qdrant server, and the way of their vectors there and back."""

import json

import pytest

from ragflash.errors import Conflict, IndexMismatch, StorageError, VectorStoreUnavailable
from ragflash.rag.index_server import QdrantServerIndex
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.move import move_points
from ragflash.rag.placement import Placement, ServerAddress, StoreKind
from ragflash.rag.records import JobState, Scope
from tests.rag.conftest import HashEmbedder, TextParser
from tests.rag.qdrant_stub import Fault

MINE = Scope(frozenset({"mine"}))
CANARY = "Zqxjkvbw7731"
TEXT = " ".join(f"Sentence {n} of {CANARY} tells {n * n} things." for n in range(90))


@pytest.fixture
def server(qdrant) -> ServerAddress:
    return ServerAddress(qdrant.url)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch) -> None:
    monkeypatch.setattr("ragflash.rag.server_calls.time.sleep", lambda _: None)


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def open_at(data_dir):
    """Opens the library with or without a server; the one before is closed first."""
    opened: list[Library] = []

    def open_one(server: ServerAddress | None, embedder=None) -> Library:
        if opened:
            opened[-1].close()
        config = LibraryConfig(data_dir, server=server)
        opened.append(Library.open(config, embedder or HashEmbedder(), parser=TextParser()))
        return opened[-1]

    yield open_one
    if opened:
        opened[-1].close()


def add(library: Library, text: str, name: str = "a.txt") -> str:
    result = library.add(MINE, "mine", name, text.encode())
    assert library.wait(MINE, result.job.id, 60).state is JobState.DONE
    return result.document.id


def found(library: Library, query: str) -> set[str]:
    return {hit.chunk.document_id for hit in library.search(MINE, query)}


def legs(library: Library, query: str) -> dict[tuple[str, int], tuple]:
    """Score of every passage in both legs, which is what the store answers."""
    return {
        (hit.chunk.document_id, hit.chunk.index): (
            round(hit.dense_score or 0.0, 5),
            round(hit.sparse_score or 0.0, 5),
        )
        for hit in library.search(MINE, query, limit=100)
    }


def move(data_dir, server, to, embedder=None):
    reports = []
    result = move_points(
        data_dir, server, embedder or HashEmbedder(), to, lambda *seen: reports.append(seen)
    )
    return result, reports


def points_on(qdrant) -> int:
    return sum(held.shard.info().points_count for held in qdrant.collections.values())


def test_a_library_lives_on_a_server(open_at, server, qdrant, data_dir):
    library = open_at(server)
    canary, other = add(library, TEXT), add(library, "A kept warranty.", "b.txt")
    assert points_on(qdrant) == library.get(MINE, canary).chunks + 1
    assert canary in found(library, CANARY)
    again = open_at(server)
    assert canary in found(again, CANARY)
    again.delete(MINE, canary)
    assert canary not in found(again, CANARY)
    assert points_on(qdrant) == 1
    assert found(again, "warranty") == {other}
    assert list((data_dir / "index").iterdir()) == []


def test_ingest_and_deletion_survive_a_server_that_stumbles(open_at, server, qdrant):
    library = open_at(server)
    qdrant.order(Fault.UNAVAILABLE, times=2)
    canary = add(library, TEXT)
    qdrant.order(Fault.LOST_REPLY)
    library.delete(MINE, canary)
    assert points_on(qdrant) == 0


@pytest.mark.parametrize("comes_back", [True, False])
def test_work_rests_while_the_server_is_down_and_fails_if_it_stays_so(
    open_at, server, qdrant, monkeypatch, comes_back
):
    monkeypatch.setattr("ragflash.rag.ingest.RETRY_PAUSES_S", (0.0, 3600.0 if comes_back else 0.0))
    library = open_at(server)
    qdrant.order(Fault.UNAVAILABLE, times=1000)
    result = library.add(MINE, "mine", "a.txt", b"words")
    if comes_back:
        job = next(seen for seen in library.watch(MINE, result.job.id) if is_second_rest(seen))
        assert job.code == library.get(MINE, result.document.id).reason == "store_unavailable"
        qdrant.faults.clear()
        assert library.add(MINE, "mine", "a.txt", b"words").deduplicated
        assert library.wait(MINE, result.job.id, 60).state is JobState.DONE
        assert found(library, "words") == {result.document.id}
    else:
        job = library.wait(MINE, result.job.id, 60)
        qdrant.faults.clear()
        assert (job.state, job.code) == (JobState.FAILED, VectorStoreUnavailable.code)
        assert job.detail.endswith("(tried 3 times)")


def is_second_rest(job) -> bool:
    return job.retry_at_ms is not None and job.retry_at_ms > job.created_ms + 1_800_000


def test_libraries_share_a_server(server, qdrant, tmp_path):
    kept = []
    for name in ("one", "two"):
        config = LibraryConfig(tmp_path / name, server=server)
        library = Library.open(config, HashEmbedder(), parser=TextParser())
        kept.append((config, add(library, f"The words of {name}.")))
        library.close()
    for config, document_id in kept:
        library = Library.open(config, HashEmbedder(), parser=TextParser())
        assert found(library, "words") == {document_id}
        library.close()
    assert len(qdrant.collections) == 2


def test_vectors_move_to_a_server_and_back(open_at, server, qdrant, data_dir):
    library = open_at(None)
    ids = [add(library, TEXT), add(library, "A kept warranty.", "b.txt")]
    chunks = sum(library.get(MINE, id_).chunks for id_ in ids)
    scores = legs(library, CANARY)
    library.close()

    result, reports = move(data_dir, server, StoreKind.SERVER)
    assert (result.documents, result.points, result.copied) == (2, chunks, 2)
    assert reports[-1] == (2, 2)
    assert points_on(qdrant) == chunks
    assert list((data_dir / "index").iterdir()) == []
    library = open_at(server)
    assert legs(library, CANARY) == scores
    library.close()

    result, _ = move(data_dir, server, StoreKind.EMBEDDED)
    assert (result.documents, result.points) == (2, chunks)
    assert qdrant.collections == {}
    library = open_at(None)
    assert legs(library, CANARY) == scores


@pytest.mark.parametrize("to", StoreKind)
def test_moving_again_does_nothing(open_at, server, data_dir, to):
    library = open_at(server if to is StoreKind.SERVER else None)
    canary = add(library, TEXT)
    library.close()
    result, _ = move(data_dir, server, to)
    assert result.was_there
    library = open_at(server if to is StoreKind.SERVER else None)
    assert canary in found(library, CANARY)


def test_an_interrupted_move_loses_nothing_and_is_continued(open_at, server, qdrant, data_dir):
    library = open_at(None)
    ids = [add(library, f"{TEXT} Number {n}.", f"{n}.txt") for n in range(3)]
    library.close()

    def stop(done: int, _: int) -> None:
        if done == 2:
            qdrant.order(Fault.UNAVAILABLE, times=1000)

    with pytest.raises(VectorStoreUnavailable):
        move_points(data_dir, server, HashEmbedder(), StoreKind.SERVER, stop)
    qdrant.faults.clear()
    library = open_at(None)
    assert all(id_ in found(library, f"Number {n}") for n, id_ in enumerate(ids))
    library.delete(MINE, ids[0])  # what has been copied already must not come back
    left = sum(library.get(MINE, id_).chunks for id_ in ids[1:])
    library.close()

    result, _ = move(data_dir, server, StoreKind.SERVER)
    assert (result.documents, result.points) == (2, left)
    assert result.copied < 3
    assert points_on(qdrant) == left
    library = open_at(server)
    assert found(library, CANARY) == set(ids[1:])


def test_a_move_with_another_embedding_model_is_refused(open_at, server, data_dir):
    library = open_at(None)
    add(library, TEXT)
    library.close()
    with pytest.raises(IndexMismatch):
        move(data_dir, server, StoreKind.SERVER, HashEmbedder(name="other"))
    assert list((data_dir / "index").iterdir()) != []


def test_a_store_that_lost_everything_is_not_moved(open_at, server, qdrant, data_dir):
    library = open_at(server)
    add(library, TEXT)
    library.close()
    (name,) = qdrant.collections
    index = QdrantServerIndex.open(server, name, HashEmbedder().dim)
    for owner in index.documents():
        index.delete_document(*owner)
    index.close()
    with pytest.raises(Conflict, match="holds no vectors"):
        move(data_dir, server, StoreKind.EMBEDDED)
    qdrant.drop(name)
    with pytest.raises(Conflict, match="has no collection"):
        move(data_dir, server, StoreKind.EMBEDDED)
    assert qdrant.collections == {}


def test_the_wrong_store_is_refused_and_the_way_out_told(open_at, server, qdrant):
    library = open_at(None)
    add(library, TEXT)
    with pytest.raises(Conflict, match="ragflash move-store` to move them"):
        open_at(server)
    assert qdrant.collections == {}


def test_the_folder_is_refused_when_the_vectors_are_on_a_server(open_at, server):
    library = open_at(server)
    add(library, TEXT)
    with pytest.raises(Conflict, match="move-store --back"):
        open_at(None)


def test_a_server_that_lost_the_collection_is_refused(open_at, server, qdrant):
    library = open_at(server)
    add(library, TEXT)
    library.close()
    qdrant.drop(next(iter(qdrant.collections)))
    with pytest.raises(Conflict, match="has no collection"):
        open_at(server)


def test_an_empty_library_changes_stores_freely(open_at, server):
    open_at(None)
    open_at(server)
    library = open_at(None)
    assert add(library, TEXT) in found(library, CANARY)


def test_a_placement_is_lasting_and_names_collections_apart(tmp_path):
    first = Placement.load(tmp_path)
    assert first.kind is StoreKind.EMBEDDED
    assert Placement.load(tmp_path) == first
    moved = first.moved(tmp_path, StoreKind.SERVER)
    assert Placement.load(tmp_path) == moved
    assert moved.collection("a") == first.collection("a") != first.collection("b")
    (tmp_path / "vectors.json").write_text(json.dumps({"library": "x", "kind": "moon"}))
    with pytest.raises(StorageError, match="damaged"):
        Placement.load(tmp_path)
