import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import qdrant_edge as qdrant

from ragflash.errors import VectorStoreUnavailable
from ragflash.rag import index_edge
from ragflash.rag.index import DENSE, SPARSE, VectorFilter, VectorPoint
from ragflash.rag.index_edge import QdrantEdgeIndex

DIM = 32
EVERYTHING = VectorFilter({"c"})
MARKED = np.random.default_rng(1).standard_normal(DIM).astype(np.float32)
MARKED /= np.linalg.norm(MARKED)
TERM = 3_141_592_653


def point(document: str, chunk: int, dense=None) -> VectorPoint:
    if dense is None:
        dense = np.random.default_rng(100 + chunk).standard_normal(DIM).astype(np.float32)
        dense /= np.linalg.norm(dense)
    return VectorPoint("c", document, chunk, dense, {TERM if document == "gone" else 7: 1.5})


def fill(index: QdrantEdgeIndex) -> None:
    index.upsert([point("kept", chunk) for chunk in range(20)])
    index.upsert([point("gone", 0, MARKED)])
    index.flush()


def traces(folder: Path) -> set[str]:
    """Folders in which the marked point lies: in segments as arrays, in the log as CBOR."""
    middle = MARKED[8:12]
    needles = [middle.tobytes(), struct.pack(">f", middle[0]), TERM.to_bytes(4, "big")]
    return {
        path.relative_to(folder).parts[0]
        for path in folder.rglob("*")
        if path.is_file() and any(needle in path.read_bytes() for needle in needles)
    }


def is_due(folder: Path) -> bool:
    return (folder / "vacuum_due").exists()


@pytest.fixture
def whole_log(monkeypatch):
    """Undo what keeps the other tests fast."""
    monkeypatch.setattr(index_edge, "_LOG_SEGMENT_BYTES", 32 << 20)


@pytest.fixture
def index(tmp_path):
    index = QdrantEdgeIndex.open(tmp_path / "own", DIM)
    fill(index)
    yield index
    index.close()


def test_a_closed_store_holds_no_vector_that_was_deleted(tmp_path, whole_log):
    index = QdrantEdgeIndex.open(tmp_path, DIM)
    fill(index)
    index.delete_document("c", "gone")
    assert traces(tmp_path) == {"segments", "wal"}
    index.close()
    assert traces(tmp_path) == set()
    assert not is_due(tmp_path)
    index = QdrantEdgeIndex.open(tmp_path, DIM)
    (read,) = index.points("c", "kept")
    for got in read:
        np.testing.assert_array_equal(got.dense, point("kept", got.chunk_index).dense)
    assert len(read) == 20
    index.close()


def test_a_vacuum_that_fails_is_made_up_for(index, tmp_path, monkeypatch, caplog):
    def refuse(what, operation):
        raise VectorStoreUnavailable("the disk is full")

    index.delete_document("c", "gone")
    with monkeypatch.context() as patch:
        patch.setattr(index_edge, "_call", refuse)
        index.close()
    assert "deleted vectors stay" in caplog.text
    assert is_due(tmp_path / "own")
    again = QdrantEdgeIndex.open(tmp_path / "own", DIM)
    again.close()
    assert not is_due(tmp_path / "own")


def test_tidies_up_once_nobody_uses_the_store(index, tmp_path, monkeypatch):
    index.delete_document("c", "gone")
    index.tidy()
    assert is_due(tmp_path / "own")
    monkeypatch.setattr(index_edge, "_UNUSED_S", 0.0)
    index.tidy()
    assert not is_due(tmp_path / "own")
    assert index.documents() == {("c", "kept")}


def test_a_deletion_of_nothing_leaves_nothing_to_do(index, tmp_path):
    index.delete_document("c", "unknown")
    assert not is_due(tmp_path / "own")


def test_what_is_deleted_during_a_vacuum_makes_another_due(index, tmp_path, monkeypatch):
    index.upsert([point("late", 30)])
    index.delete_document("c", "gone")
    call = index_edge._call
    deleting = threading.Thread(target=index.delete_document, args=("c", "late"))

    def interrupted(what, operation):
        if what == "vacuum" and deleting.ident is None:
            deleting.start()
            deleting.join()
        return call(what, operation)

    monkeypatch.setattr(index_edge, "_call", interrupted)
    index.vacuum()
    assert is_due(tmp_path / "own")
    index.vacuum()
    assert not is_due(tmp_path / "own")


def test_takes_over_a_store_of_a_former_version(tmp_path):
    vectors = {DENSE: qdrant.EdgeVectorParams(size=DIM, distance=qdrant.Distance.Cosine)}
    former = qdrant.EdgeConfig(
        vectors=vectors,
        sparse_vectors={SPARSE: qdrant.EdgeSparseVectorParams()},
        wal_enabled=True,
    )
    shard = qdrant.EdgeShard.create(str(tmp_path), former)
    for field in ("collection_id", "document_id"):
        shard.update(
            qdrant.UpdateOperation.create_field_index(field, qdrant.PayloadSchemaType.Keyword)
        )
    fill(QdrantEdgeIndex(shard, tmp_path))
    shard.close()
    for _ in range(2):  # as it was, and rewritten
        index = QdrantEdgeIndex.open(tmp_path, DIM)
        (hit,) = index.query_dense(MARKED, EVERYTHING, 1)
        assert (hit.document_id, hit.score) == ("gone", pytest.approx(1.0))
        ((read,),) = index.points("c", "gone")
        np.testing.assert_array_equal(read.dense, MARKED)
        assert index.count("c", "kept") == 20
        index.close()
        assert not is_due(tmp_path)
    codes = list(tmp_path.glob("segments/*/vector_storage-dense/quantized*"))
    assert codes


def test_scores_are_of_the_whole_vectors(index):
    hits = index.query_dense(MARKED, EVERYTHING, 21)
    exact = {("gone", 0): 1.0} | {
        ("kept", chunk): float(point("kept", chunk).dense @ MARKED) for chunk in range(20)
    }
    assert len(hits) == 21
    for hit in hits:
        score = exact[hit.document_id, hit.chunk_index]
        assert hit.score == pytest.approx(score, abs=1e-6)
