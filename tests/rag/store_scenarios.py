"""What every driver of the vector store has to do; `test_index.py` runs it on each of them.

A driver gives `open_store(dim=4, name="own")`, which opens the store of that name again when it is
called again; `close` it first where the store has one owner.
"""

from collections.abc import Callable

import numpy as np
import pytest

from ragflash.errors import StorageError, VectorStoreUnavailable
from ragflash.rag.index import BATCH_POINTS, VectorFilter, VectorIndex, VectorPoint

OpenStore = Callable[..., VectorIndex]
EVERYTHING = VectorFilter({"c"})


def point(document: str, chunk: int = 0, collection: str = "c", **sparse: float) -> VectorPoint:
    dense = np.zeros(4, np.float32)
    dense[chunk % 4] = 1.0
    terms = {int(name[1:]): weight for name, weight in sparse.items()}
    return VectorPoint(collection, document, chunk, dense, terms)


class StoreScenarios:
    """The fixture `open_store` is the driver's; `index` is a store of dimension 4."""

    @pytest.fixture
    def index(self, open_store: OpenStore) -> VectorIndex:
        return open_store()

    def test_finds_by_direction_and_by_term(self, index):
        index.upsert([point("d", 0, t7=1.0), point("d", 1, t8=2.0)])
        hits = index.query_dense(np.array([0, 1, 0, 0], np.float32), EVERYTHING, 1)
        assert [(hit.document_id, hit.chunk_index) for hit in hits] == [("d", 1)]
        assert hits[0].score == pytest.approx(1.0)
        (hit,) = index.query_sparse({7: 3.0}, EVERYTHING, 10)
        assert (hit.chunk_index, hit.score) == (0, 3.0)

    def test_returns_nothing_for_terms_that_no_point_has(self, index):
        index.upsert([point("d", t7=1.0), point("e")])
        assert index.query_sparse({9: 1.0}, EVERYTHING, 10) == []
        assert index.query_sparse({}, EVERYTHING, 10) == []

    def test_takes_the_largest_term_ids(self, index):
        largest = 2**32 - 1
        index.upsert([VectorPoint("c", "d", 0, point("d").dense, {largest: 0.5})])
        (hit,) = index.query_sparse({largest: 1.0}, EVERYTHING, 10)
        assert hit.score == 0.5

    def test_filters_by_collection_and_document(self, index):
        index.upsert(
            [point("d", t7=1.0), point("e", t7=1.0), point("f", t7=1.0, collection="other")]
        )

        def found(**scope) -> set[str]:
            seen = VectorFilter(**scope)
            hits = index.query_sparse({7: 1.0}, seen, 10)
            near = index.query_dense(point("d").dense, seen, 10)
            assert {hit.document_id for hit in near} == {hit.document_id for hit in hits}
            return {hit.document_id for hit in hits}

        assert found(collection_ids={"c"}) == {"d", "e"}
        assert found(collection_ids={"c", "other"}, excluded_ids={"d"}) == {"e", "f"}
        assert found(collection_ids={"c"}, document_ids={"d", "f"}) == {"d"}
        assert found(collection_ids={"c"}, document_ids={"d"}, excluded_ids={"d"}) == set()
        assert found(collection_ids={"c"}, document_ids=set()) == set()
        assert found(collection_ids=set()) == set()

    def test_writing_twice_is_writing_once(self, index):
        index.upsert([point("d", 0), point("d", 1)])
        index.upsert([point("d", 1)])
        assert index.count("c", "d") == 2

    def test_writes_and_reads_more_than_a_batch(self, index):
        written = [point("d", chunk, t7=chunk + 1.0) for chunk in range(BATCH_POINTS + 3)]
        index.upsert([*written, point("e", 1)])
        assert index.count("c", "d") == BATCH_POINTS + 3
        batches = list(index.points("c", "d"))
        assert max(len(batch) for batch in batches) <= BATCH_POINTS
        read = sorted((p for batch in batches for p in batch), key=lambda p: p.chunk_index)
        assert [(p.id, dict(p.sparse)) for p in read] == [(p.id, p.sparse) for p in written]
        for got, put in zip(read, written, strict=True):
            np.testing.assert_array_equal(got.dense, put.dense)

    def test_reads_a_point_without_terms_and_no_points_at_all(self, index):
        assert list(index.points("c", "d")) == []
        index.upsert([point("d")])
        ((read,),) = index.points("c", "d")
        assert read.sparse == {}

    def test_deletes_one_document_of_one_collection(self, index):
        index.upsert([point("d"), point("e"), point("f", collection="other")])
        index.delete_document("c", "d")
        index.delete_document("c", "f")
        assert index.documents() == {("c", "e"), ("other", "f")}
        assert index.count("c", "d") == 0

    @pytest.mark.parametrize("ids", [("", "d"), ("c", ""), ("", "")])
    def test_refuses_an_unscoped_delete(self, index, ids):
        index.upsert([point("d")])
        with pytest.raises(ValueError, match="collection and document"):
            index.delete_document(*ids)
        assert index.count("c", "d") == 1

    def test_keeps_points_over_a_restart(self, open_store, index):
        index.upsert([point("d", t7=1.0)])
        index.flush()
        index.close()
        again = open_store()
        assert again.count("c", "d") == 1
        assert again.documents() == {("c", "d")}

    def test_refuses_vectors_of_another_dimension(self, open_store, index):
        wrong = VectorPoint("c", "d", 0, np.ones(5, np.float32), {})
        with pytest.raises(VectorStoreUnavailable, match="could not write points"):
            index.upsert([wrong])
        index.close()
        with pytest.raises(StorageError, match="5"):
            open_store(dim=5)

    def test_two_stores_do_not_see_each_other(self, open_store, index):
        other = open_store(name="other")
        index.upsert([point("d", t7=1.0)])
        other.upsert([point("e", t7=1.0)])
        assert index.documents() == {("c", "d")}
        assert [hit.document_id for hit in other.query_sparse({7: 1.0}, EVERYTHING, 9)] == ["e"]

    def test_is_empty_after_it_was_destroyed(self, open_store, index):
        index.upsert([point("d")])
        index.destroy()
        assert open_store().documents() == set()
