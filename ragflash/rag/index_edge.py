"""The embedded driver of the vector store: Qdrant's engine inside this process."""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import qdrant_edge as qdrant

from ragflash.errors import StorageError, VectorStoreUnavailable
from ragflash.rag.disk import Disk
from ragflash.rag.files import storage_errors
from ragflash.rag.index import (
    BATCH_POINTS,
    DENSE,
    INDEXED_FIELDS,
    MAX_DOCUMENTS,
    SPARSE,
    VectorFilter,
    VectorHit,
    VectorPoint,
    check_owner,
)

_CONFIG = "edge_config.json"
_MARKER = "vacuum_due"
_UNUSED_S = 60.0
_LOG_SEGMENT_BYTES = 32 << 20  # the engine keeps one finished segment of its log, and the open one

_EXACTLY = qdrant.SearchParams(
    quantization=qdrant.QuantizationSearchParams(rescore=True, oversampling=4.0)
)

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class QdrantEdgeIndex:
    """Qdrant's engine inside this process, in a folder that one process owns.

    The write-ahead log is on, so that what `upsert` returned from survives a kill. Every search
    compares all vectors in scope: no graph is built, since building one blocks for minutes where
    it would begin to pay. What is compared are codes of four bits (TurboQuant, Zandieh et al.
    2025), four times as many as are asked for are then compared exactly.

    A deleted point is not found any more, but stays in the files until `vacuum`, which `tidy` does
    after a minute without any use, and `close`: it holds the whole process up, some 10 s for
    100,000 points. A file in the folder says that it is due, so that a crash postpones it only.
    """

    def __init__(self, shard: qdrant.EdgeShard, folder: Path) -> None:
        self._shard = shard
        self._folder = folder
        self._marker = folder / _MARKER
        self._lock = threading.Lock()  # a deletion is either before a vacuum, or makes another due
        self._is_due = self._marker.exists()
        self._used = time.monotonic()

    @classmethod
    def open(cls, folder: Path, dim: int) -> Self:
        """Open the store, or create it with its payload indexes.

        Raises:
            StorageError: The folder cannot be used, or holds vectors of another dimension.
        """
        config = _config(dim)
        try:
            if (folder / _CONFIG).exists():
                if not _has_codes(folder):  # made by a former version: a vacuum makes them
                    _mark(folder / _MARKER)
                return cls(qdrant.EdgeShard.load(str(folder), config), folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            shard = qdrant.EdgeShard.create(str(folder), config)
            for field in INDEXED_FIELDS:
                shard.update(
                    qdrant.UpdateOperation.create_field_index(
                        field, qdrant.PayloadSchemaType.Keyword
                    )
                )
            shard.flush()
        except Exception as error:  # the engine raises nothing more specific
            raise StorageError(f"the vector store in {folder} cannot be opened: {error}") from error
        return cls(shard, folder)

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
        return self._query(qdrant.Query.Nearest(vector.tolist(), using=DENSE), scope, limit)

    def query_sparse(
        self, weights: Mapping[int, float], scope: VectorFilter, limit: int
    ) -> list[VectorHit]:
        """Chunks that share a term, by dot product."""
        if not weights:
            return []
        return self._query(qdrant.Query.Nearest(_sparse(weights), using=SPARSE), scope, limit)

    def delete_document(self, collection_id: str, document_id: str) -> None:
        """Remove a document's points.

        Raises:
            ValueError: An id is empty: a delete without a scope is refused.
            StorageError: The disk refused.
            VectorStoreUnavailable: The engine did.
        """
        scope = _one_document(collection_id, document_id)
        if not self.count(collection_id, document_id):
            return
        with self._lock, storage_errors(f"{self._marker} cannot be written"):
            _mark(self._marker)
            self._update("delete points", qdrant.UpdateOperation.delete_points_by_filter(scope))
            self._is_due = True

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

    def points(self, collection_id: str, document_id: str) -> Iterator[list[VectorPoint]]:
        """Read a document's points back, at most `BATCH_POINTS` at a time."""
        scope = _one_document(collection_id, document_id)
        offset: UUID | int | str | None = None
        while True:
            request = qdrant.ScrollRequest(
                offset=offset,
                limit=BATCH_POINTS,
                filter=scope,
                with_payload=True,
                with_vector=True,
            )
            records, offset = self._scroll(request)
            if records:
                yield [_read(record) for record in records]
            if offset is None:
                return

    def flush(self) -> None:
        """Make everything written so far survive a power failure."""
        _call("flush", self._shard.flush)

    def vacuum(self) -> None:
        """Rewrite the files without what was deleted, if anything was; to be repeated if it fails.

        The engine writes the points that are left into a new segment, removes the former one when
        it flushes, and drops the parts of its log that are finished and flushed; so the log is
        moved on past everything that it holds by an update that matches no point.

        Raises:
            VectorStoreUnavailable: The engine refused.
            StorageError: The disk did.
        """
        with self._lock:
            was_due, self._is_due = self._is_due, False
        if not was_due:
            return
        try:
            _call("vacuum", self._shard.optimize)
            filler = {"filler": "x" * (_LOG_SEGMENT_BYTES // 2 + 1)}  # two do not fit in a segment
            nothing = qdrant.Filter(must=[_is_one_of("collection_id", [""])])
            for _ in range(3):
                self._update(
                    "vacuum", qdrant.UpdateOperation.set_payload_by_filter(nothing, filler)
                )
            self.flush()
        except BaseException:
            self._is_due = True
            raise
        with self._lock, storage_errors(f"{self._marker} cannot be removed"):
            if not self._is_due:
                self._marker.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Vacuum if that is due and nobody has used the store for a minute."""
        if self._is_due and time.monotonic() - self._used >= _UNUSED_S:
            self._try_to_vacuum()

    def close(self) -> None:
        """Vacuum if that is due, flush, and release the folder."""
        self._try_to_vacuum()
        self._shard.close()

    def _try_to_vacuum(self) -> None:
        try:
            self.vacuum()
        except (VectorStoreUnavailable, StorageError):
            _log.warning("deleted vectors stay in the files for now", exc_info=True)
            self._used = time.monotonic()

    def destroy(self) -> None:
        """Release the folder and remove it.

        Raises:
            StorageError: The disk refused.
        """
        self._shard.close()
        with storage_errors(f"the vector store in {self._folder} cannot be removed"):
            shutil.rmtree(self._folder)

    def _scroll(
        self, request: qdrant.ScrollRequest
    ) -> tuple[list[qdrant.Record], UUID | int | str | None]:
        return _call("read points", lambda: self._shard.scroll(request))

    def _values(self, key: str, condition: qdrant.FieldCondition | None) -> list[str]:
        scope = None if condition is None else qdrant.Filter(must=[condition])
        request = qdrant.FacetRequest(key=key, limit=MAX_DOCUMENTS, exact=True, filter=scope)
        response = _call("list documents", lambda: self._shard.facet(request))
        return [str(hit.value) for hit in response.hits]

    def _update(self, what: str, operation: qdrant.UpdateOperation) -> None:
        self._used = time.monotonic()
        _call(what, lambda: self._shard.update(operation))

    def _query(self, query: qdrant.Query, scope: VectorFilter, limit: int) -> list[VectorHit]:
        if not scope.collection_ids or (scope.document_ids is not None and not scope.document_ids):
            return []
        self._used = time.monotonic()
        request = qdrant.QueryRequest(
            limit=limit, query=query, filter=_filter(scope), with_payload=True, params=_EXACTLY
        )
        found = _call("search", lambda: self._shard.query(request))
        hits = []
        for point in found:
            payload = point.payload or {}
            hits.append(
                VectorHit(str(payload["document_id"]), int(payload["chunk_index"]), point.score)
            )
        return hits


def _config(dim: int) -> qdrant.EdgeConfig:
    dense = qdrant.EdgeVectorParams(
        size=dim,
        distance=qdrant.Distance.Cosine,
        quantization_config=qdrant.TurboQuantQuantizationConfig(
            bits=qdrant.TurboQuantBitSize.Bits4
        ),
    )
    # One deleted point makes a segment worth rewriting, and no number of points a graph.
    optimizers = qdrant.EdgeOptimizersConfig(
        deleted_threshold=1e-9, vacuum_min_vector_number=1, indexing_threshold=10**9
    )
    return qdrant.EdgeConfig(
        vectors={DENSE: dense},
        sparse_vectors={SPARSE: qdrant.EdgeSparseVectorParams()},
        optimizers=optimizers,
        wal_enabled=True,
    )


def _has_codes(folder: Path) -> bool:
    config = json.loads((folder / _CONFIG).read_bytes())
    return bool(config["vectors"][DENSE].get("quantization_config"))


def _mark(marker: Path) -> None:
    if not marker.exists():
        Disk().write(marker, [])


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
    vectors = {DENSE: point.dense.tolist(), SPARSE: _sparse(point.sparse)}
    return qdrant.Point(point.id, vectors, payload)


def _read(record: qdrant.Record) -> VectorPoint:
    payload, vectors = record.payload or {}, record.vector
    dense = vectors[DENSE] if isinstance(vectors, dict) else None
    sparse = vectors.get(SPARSE) if isinstance(vectors, dict) else None
    if not isinstance(dense, list):
        raise VectorStoreUnavailable(f"point {record.id} of the vector store has no vector")
    weights = (
        dict(zip(sparse.indices, sparse.values, strict=True))
        if isinstance(sparse, qdrant.SparseVector)
        else {}
    )
    return VectorPoint(
        str(payload["collection_id"]),
        str(payload["document_id"]),
        int(payload["chunk_index"]),
        np.array(dense, np.float32),
        weights,
    )


def _sparse(weights: Mapping[int, float]) -> qdrant.SparseVector:
    return qdrant.SparseVector(list(weights.keys()), list(weights.values()))


def _one_document(collection_id: str, document_id: str) -> qdrant.Filter:
    check_owner(collection_id, document_id)
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
    # For one value the engine has a test that takes a third of the time on every point.
    match = qdrant.MatchAny(sorted(values)) if len(values) > 1 else qdrant.MatchValue(*values)
    return qdrant.FieldCondition(key, match=match)
