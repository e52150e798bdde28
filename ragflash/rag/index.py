"""The vector store: one small contract and the embedded driver.

A point is a chunk: a dense vector, a sparse vector, and a payload of identifiers only. Text stays
in the catalogue, so that deleting it there deletes it.
"""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import qdrant_edge as qdrant

from ragflash.errors import StorageError, VectorStoreUnavailable

BATCH_POINTS = 256

_DENSE, _SPARSE = "dense", "sparse"
_NAMESPACE = uuid.UUID("6f1d3a52-5c0e-4f0b-9a54-3f0f0c1d7c11")
_ALL_VALUES = 1_000_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class VectorPoint:
    """One chunk as the store keeps it.

    Attributes:
        dense: float32 [dim], unit length.
        sparse: Weight by 32-bit term id; may be empty.
    """

    collection_id: str
    document_id: str
    chunk_index: int
    dense: npt.NDArray[np.float32]
    sparse: Mapping[int, float]

    @property
    def id(self) -> uuid.UUID:
        """The same for the same chunk, so that writing twice is writing once."""
        return uuid.uuid5(_NAMESPACE, f"{self.document_id}/{self.chunk_index}")


@dataclass(frozen=True, slots=True)
class VectorHit:
    """A chunk that a leg of retrieval found; larger scores are better."""

    document_id: str
    chunk_index: int
    score: float


@dataclass(frozen=True, slots=True)
class VectorFilter:
    """Which points a query may see.

    Attributes:
        collection_ids: Never empty: what has no scope sees nothing.
        document_ids: Only these; `None` is no restriction.
        excluded_ids: Never these (documents that are not searchable yet, or no longer).
    """

    collection_ids: Collection[str]
    document_ids: Collection[str] | None = None
    excluded_ids: Collection[str] = ()


class VectorIndex(Protocol):
    """What retrieval and ingest need of a vector store; every method is thread-safe."""

    def upsert(self, points: Sequence[VectorPoint]) -> None:
        """Write points durably, in batches of at most `BATCH_POINTS`."""

    def query_dense(
        self, vector: npt.NDArray[np.float32], scope: VectorFilter, limit: int
    ) -> list[VectorHit]:
        """Nearest chunks by cosine similarity."""

    def query_sparse(
        self, weights: Mapping[int, float], scope: VectorFilter, limit: int
    ) -> list[VectorHit]:
        """Chunks that share a term, by dot product."""

    def delete_document(self, collection_id: str, document_id: str) -> None:
        """Remove a document's points; both ids must be given."""

    def count(self, collection_id: str, document_id: str) -> int:
        """Number of a document's points, exactly."""

    def documents(self) -> set[tuple[str, str]]:
        """Collection and document of every point."""

    def flush(self) -> None:
        """Make everything written so far survive a power failure."""

    def close(self) -> None:
        """Release the store; nothing may be called afterwards."""


class QdrantEdgeIndex:
    """Qdrant's engine inside this process, in a folder that one process owns.

    The write-ahead log is on, so that what `upsert` returned from survives a kill.
    """

    def __init__(self, shard: qdrant.EdgeShard) -> None:
        self._shard = shard

    @classmethod
    def open(cls, folder: Path, dim: int) -> Self:
        """Open the store, or create it with its payload indexes.

        Raises:
            StorageError: The folder cannot be used, or holds vectors of another dimension.
        """
        config = qdrant.EdgeConfig(
            vectors={_DENSE: qdrant.EdgeVectorParams(size=dim, distance=qdrant.Distance.Cosine)},
            sparse_vectors={_SPARSE: qdrant.EdgeSparseVectorParams()},
            wal_enabled=True,
        )
        try:
            if (folder / "edge_config.json").exists():
                return cls(qdrant.EdgeShard.load(str(folder), config))
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            shard = qdrant.EdgeShard.create(str(folder), config)
            for field in ("collection_id", "document_id"):
                shard.update(
                    qdrant.UpdateOperation.create_field_index(
                        field, qdrant.PayloadSchemaType.Keyword
                    )
                )
            shard.flush()
        except Exception as error:  # the engine raises nothing more specific
            raise StorageError(f"the vector store in {folder} cannot be opened: {error}") from error
        return cls(shard)

    def upsert(self, points: Sequence[VectorPoint]) -> None:
        """Write points durably, in batches of at most `BATCH_POINTS`.

        Raises:
            VectorStoreUnavailable: The engine refused a batch; earlier ones are written.
        """
        for start in range(0, len(points), BATCH_POINTS):
            batch = [_point(point) for point in points[start : start + BATCH_POINTS]]
            self._update("write points", qdrant.UpdateOperation.upsert_points(batch))

    def query_dense(
        self, vector: npt.NDArray[np.float32], scope: VectorFilter, limit: int
    ) -> list[VectorHit]:
        """Nearest chunks by cosine similarity."""
        return self._query(qdrant.Query.Nearest(vector.tolist(), using=_DENSE), scope, limit)

    def query_sparse(
        self, weights: Mapping[int, float], scope: VectorFilter, limit: int
    ) -> list[VectorHit]:
        """Chunks that share a term, by dot product."""
        if not weights:
            return []
        return self._query(qdrant.Query.Nearest(_sparse(weights), using=_SPARSE), scope, limit)

    def delete_document(self, collection_id: str, document_id: str) -> None:
        """Remove a document's points.

        Raises:
            ValueError: An id is empty: a delete without a scope is refused.
        """
        scope = _one_document(collection_id, document_id)
        self._update("delete points", qdrant.UpdateOperation.delete_points_by_filter(scope))

    def count(self, collection_id: str, document_id: str) -> int:
        """Number of a document's points, exactly."""
        request = qdrant.CountRequest(exact=True, filter=_one_document(collection_id, document_id))
        return _call("count points", lambda: self._shard.count(request))

    def documents(self) -> set[tuple[str, str]]:
        """Collection and document of every point."""
        collections = self._values("collection_id", None)
        return {
            (collection, document)
            for collection in collections
            for document in self._values("document_id", _is_one_of("collection_id", [collection]))
        }

    def flush(self) -> None:
        """Make everything written so far survive a power failure."""
        _call("flush", self._shard.flush)

    def close(self) -> None:
        """Flush and release the folder."""
        self._shard.close()

    def _values(self, key: str, condition: qdrant.FieldCondition | None) -> list[str]:
        scope = None if condition is None else qdrant.Filter(must=[condition])
        request = qdrant.FacetRequest(key=key, limit=_ALL_VALUES, exact=True, filter=scope)
        response = _call("list documents", lambda: self._shard.facet(request))
        return [str(hit.value) for hit in response.hits]

    def _update(self, what: str, operation: qdrant.UpdateOperation) -> None:
        _call(what, lambda: self._shard.update(operation))

    def _query(self, query: qdrant.Query, scope: VectorFilter, limit: int) -> list[VectorHit]:
        if not scope.collection_ids or (scope.document_ids is not None and not scope.document_ids):
            return []
        request = qdrant.QueryRequest(
            limit=limit, query=query, filter=_filter(scope), with_payload=True
        )
        found = _call("search", lambda: self._shard.query(request))
        hits = []
        for point in found:
            payload = point.payload or {}
            hits.append(
                VectorHit(str(payload["document_id"]), int(payload["chunk_index"]), point.score)
            )
        return hits


def _call(what: str, operation: Callable[[], _T]) -> _T:
    try:
        return operation()
    except Exception as error:  # the engine raises nothing more specific
        raise VectorStoreUnavailable(f"the vector store could not {what}: {error}") from error


def _point(point: VectorPoint) -> qdrant.Point:
    payload = {
        "collection_id": point.collection_id,
        "document_id": point.document_id,
        "chunk_index": point.chunk_index,
    }
    vectors = {_DENSE: point.dense.tolist(), _SPARSE: _sparse(point.sparse)}
    return qdrant.Point(point.id, vectors, payload)


def _sparse(weights: Mapping[int, float]) -> qdrant.SparseVector:
    return qdrant.SparseVector(list(weights.keys()), list(weights.values()))


def _one_document(collection_id: str, document_id: str) -> qdrant.Filter:
    if not collection_id or not document_id:
        raise ValueError("points are addressed by collection and document")
    return qdrant.Filter(
        must=[
            qdrant.FieldCondition("collection_id", match=qdrant.MatchValue(collection_id)),
            qdrant.FieldCondition("document_id", match=qdrant.MatchValue(document_id)),
        ]
    )


def _filter(scope: VectorFilter) -> qdrant.Filter:
    filters = qdrant.Filter(must=[_is_one_of("collection_id", scope.collection_ids)])
    if scope.document_ids is not None:
        filters = qdrant.Filter(must=[filters, _is_one_of("document_id", scope.document_ids)])
    if scope.excluded_ids:
        excluded = _is_one_of("document_id", scope.excluded_ids)
        filters = qdrant.Filter(must=[filters], must_not=[excluded])
    return filters


def _is_one_of(key: str, values: Collection[str]) -> qdrant.FieldCondition:
    return qdrant.FieldCondition(key, match=qdrant.MatchAny(sorted(values)))
