import numpy as np
import pytest

from ragflash.errors import StorageError, VectorStoreUnavailable
from ragflash.rag.index import BATCH_POINTS, VectorFilter, VectorPoint
from ragflash.rag.index_edge import QdrantEdgeIndex


def point(document: str, chunk: int = 0, collection: str = "c", **sparse: float) -> VectorPoint:
    dense = np.zeros(4, np.float32)
    dense[chunk % 4] = 1.0
    terms = {int(name[1:]): weight for name, weight in sparse.items()}
    return VectorPoint(collection, document, chunk, dense, terms)


@pytest.fixture
def index(tmp_path):
    store = QdrantEdgeIndex.open(tmp_path / "index", 4)
    yield store
    store.close()


EVERYTHING = VectorFilter({"c"})


def test_finds_by_direction_and_by_term(index):
    index.upsert([point("d", 0, t7=1.0), point("d", 1, t8=2.0)])
    hits = index.query_dense(np.array([0, 1, 0, 0], np.float32), EVERYTHING, 1)
    assert [(hit.document_id, hit.chunk_index) for hit in hits] == [("d", 1)]
    (hit,) = index.query_sparse({7: 3.0}, EVERYTHING, 10)
    assert (hit.chunk_index, hit.score) == (0, 3.0)


def test_returns_nothing_for_terms_that_no_point_has(index):
    index.upsert([point("d", t7=1.0), point("e")])
    assert index.query_sparse({9: 1.0}, EVERYTHING, 10) == []
    assert index.query_sparse({}, EVERYTHING, 10) == []


def test_filters_by_collection_and_document(index):
    index.upsert([point("d", t7=1.0), point("e", t7=1.0), point("f", t7=1.0, collection="other")])

    def found(**scope) -> set[str]:
        hits = index.query_sparse({7: 1.0}, VectorFilter(**scope), 10)
        return {hit.document_id for hit in hits}

    assert found(collection_ids={"c"}) == {"d", "e"}
    assert found(collection_ids={"c", "other"}, excluded_ids={"d"}) == {"e", "f"}
    assert found(collection_ids={"c"}, document_ids={"d", "f"}) == {"d"}
    assert found(collection_ids={"c"}, document_ids=set()) == set()
    assert found(collection_ids=set()) == set()


def test_writing_twice_is_writing_once(index):
    index.upsert([point("d", 0), point("d", 1)])
    index.upsert([point("d", 1)])
    assert index.count("c", "d") == 2


def test_writes_more_than_a_batch(index):
    index.upsert([point("d", chunk) for chunk in range(BATCH_POINTS + 3)])
    assert index.count("c", "d") == BATCH_POINTS + 3


def test_deletes_one_document_of_one_collection(index):
    index.upsert([point("d"), point("e"), point("f", collection="other")])
    index.delete_document("c", "d")
    index.delete_document("c", "f")
    assert index.documents() == {("c", "e"), ("other", "f")}


@pytest.mark.parametrize("ids", [("", "d"), ("c", ""), ("", "")])
def test_refuses_an_unscoped_delete(index, ids):
    index.upsert([point("d")])
    with pytest.raises(ValueError, match="collection and document"):
        index.delete_document(*ids)
    assert index.count("c", "d") == 1


def test_keeps_points_over_a_restart(tmp_path, index):
    index.upsert([point("d", t7=1.0)])
    index.close()
    again = QdrantEdgeIndex.open(tmp_path / "index", 4)
    assert again.count("c", "d") == 1
    again.close()


def test_has_one_owner(tmp_path, index):
    with pytest.raises(StorageError, match="cannot be opened"):
        QdrantEdgeIndex.open(tmp_path / "index", 4)


def test_names_what_failed(index):
    wrong = VectorPoint("c", "d", 0, np.ones(5, np.float32), {})
    with pytest.raises(VectorStoreUnavailable, match="could not write points"):
        index.upsert([wrong])
