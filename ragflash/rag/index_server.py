"""The vector store on a Qdrant server, over its REST interface.

One server collection holds the points of one library under one embedding model. Every operation
here may be repeated, so that what a passing fault interrupted is tried again: ids are made of what
they name, deletes are by filter, and what exists already is not created twice.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Self

import httpx
import numpy as np
import numpy.typing as npt
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import UnexpectedResponse

from ragflash.errors import Conflict, SettingInvalid, StorageError, VectorStoreUnavailable
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
from ragflash.rag.placement import ServerAddress
from ragflash.rag.server_calls import RetryPolicy, ServerCalls

BATCH_BYTES = 4_800_000  # of one request's body; servers and proxies begin to refuse at 5 MB

_ENVELOPE_BYTES = len('{"points":[]}')


class QdrantServerIndex:
    """One collection of a Qdrant server; thread-safe, as its client is.

    Every method raises `VectorStoreUnavailable`, which says what could not be done and what to do,
    after passing faults have been waited out.
    """

    def __init__(self, server: ServerAddress, collection: str, retry: RetryPolicy) -> None:
        """Use `open`."""
        self._url = server.url
        self._collection = collection
        self._call = ServerCalls(server.url, retry).run
        try:
            self._client = QdrantClient(
                url=server.url,
                port=None,
                timeout=server.timeout_s,
                headers={"api-key": server.api_key} if server.api_key is not None else None,
                check_compatibility=False,
            )
        except ValueError as error:
            raise SettingInvalid(
                f"RAGFLASH_QDRANT_URL is not the address of a server: {error}"
            ) from error

    @classmethod
    def open(
        cls,
        server: ServerAddress,
        collection: str,
        dim: int,
        *,
        create: bool = True,
        retry: RetryPolicy | None = None,
    ) -> Self:
        """Connect, and create the collection and its payload indexes if they are not there.

        Raises:
            SettingInvalid: The URL is not an address.
            VectorStoreUnavailable: The server does not answer, or refuses.
            StorageError: The collection holds vectors of another kind or dimension.
            Conflict: There is no collection, and none is to be created.
        """
        index = cls(server, collection, retry or RetryPolicy())
        try:
            index._prepare(dim, create=create)
        except BaseException:
            index.close()
            raise
        return index

    def upsert(self, points: Sequence[VectorPoint]) -> None:
        """Write points and see that they are there, in batches of bounded number and size."""
        for batch in batches(points):
            self._write(batch)

    def query_dense(
        self, vector: npt.NDArray[np.float32], scope: VectorFilter, limit: int
    ) -> list[VectorHit]:
        """Nearest chunks by cosine similarity."""
        return self._query(vector.tolist(), DENSE, scope, limit)

    def query_sparse(
        self, weights: Mapping[int, float], scope: VectorFilter, limit: int
    ) -> list[VectorHit]:
        """Chunks that share a term, by dot product."""
        return self._query(_sparse(weights), SPARSE, scope, limit) if weights else []

    def delete_document(self, collection_id: str, document_id: str) -> None:
        """Remove a document's points.

        Raises:
            ValueError: An id is empty: a delete without a scope is refused.
        """
        selector = models.FilterSelector(filter=_one_document(collection_id, document_id))
        self._update("delete points", lambda: self._client.delete(self._collection, selector))

    def count(self, collection_id: str, document_id: str) -> int:
        """Number of a document's points, exactly."""
        return self._count(_one_document(collection_id, document_id))

    def documents(self) -> set[tuple[str, str]]:
        """Collection and document of every point."""
        return {
            (collection, document)
            for collection in self._values("collection_id", None)
            for document in self._values("document_id", _is("collection_id", collection))
        }

    def points(self, collection_id: str, document_id: str) -> Iterator[list[VectorPoint]]:
        """Read a document's points back, at most `BATCH_POINTS` at a time."""
        scope = _one_document(collection_id, document_id)
        offset: models.ExtendedPointId | None = None
        while True:
            records, offset = self._scroll(scope, offset)
            if records:
                yield [_read(record) for record in records]
            if offset is None:
                return

    def flush(self) -> None:
        """Do nothing: the server has every confirmed write in its log."""

    def tidy(self) -> None:
        """Do nothing: the server rewrites its files by rules of its own."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def destroy(self) -> None:
        """Delete the collection on the server, if it is there, and close."""
        self._call(
            "delete the collection", lambda: self._client.delete_collection(self._collection)
        )
        self.close()

    def _prepare(self, dim: int, *, create: bool) -> None:
        exists = self._call(
            "look for its collection", lambda: self._client.collection_exists(self._collection)
        )
        if not exists and not create:
            raise Conflict(
                f"the Qdrant server at {self._url} has no collection {self._collection!r}, "
                "which holds the vectors of this library's documents: set RAGFLASH_QDRANT_URL to "
                "the server that has it, or restore its snapshot there"
            )
        if not exists:
            self._call("create its collection", lambda: self._create(dim))
        info = self._call(
            "describe its collection", lambda: self._client.get_collection(self._collection)
        )
        self._check_vectors(info.config.params, dim)
        for name in INDEXED_FIELDS:
            if name not in info.payload_schema:
                self._index_field(name)

    def _create(self, dim: int) -> bool:
        try:
            return self._client.create_collection(
                self._collection,
                vectors_config={
                    DENSE: models.VectorParams(size=dim, distance=models.Distance.COSINE)
                },
                sparse_vectors_config={SPARSE: models.SparseVectorParams()},
            )
        except UnexpectedResponse as error:
            if error.status_code == httpx.codes.CONFLICT:  # an attempt that seemed to fail did it
                return True
            raise

    def _index_field(self, name: str) -> None:
        self._update(
            f"index the field {name}",
            lambda: self._client.create_payload_index(
                self._collection, name, field_schema=models.PayloadSchemaType.KEYWORD
            ),
        )

    def _check_vectors(self, params: models.CollectionParams, dim: int) -> None:
        vectors = params.vectors if isinstance(params.vectors, dict) else {}
        dense = vectors.get(DENSE)
        if dense is None or SPARSE not in (params.sparse_vectors or {}):
            raise StorageError(
                f"collection {self._collection!r} of the Qdrant server at {self._url} was not "
                "made by ragflash: delete or rename it there"
            )
        if dense.size != dim:
            raise StorageError(
                f"collection {self._collection!r} of the Qdrant server at {self._url} holds "
                f"vectors of {dense.size} numbers, and the embedding model makes {dim}"
            )

    def _write(self, batch: list[models.PointStruct]) -> None:
        self._update("write points", lambda: self._client.upsert(self._collection, batch))
        ids: list[models.ExtendedPointId] = sorted({str(point.id) for point in batch})
        stored = self._count(models.Filter(must=[models.HasIdCondition(has_id=ids)]))
        if stored != len(ids):
            raise VectorStoreUnavailable(
                f"the Qdrant server at {self._url} confirmed {len(ids)} points and holds {stored} "
                "of them: see its log"
            )

    def _count(self, scope: models.Filter) -> int:
        counted = self._call(
            "count points", lambda: self._client.count(self._collection, scope, exact=True)
        )
        return counted.count

    def _values(self, key: str, condition: models.FieldCondition | None) -> list[str]:
        scope = None if condition is None else models.Filter(must=[condition])
        found = self._call(
            "list documents",
            lambda: self._client.facet(
                self._collection, key, facet_filter=scope, limit=MAX_DOCUMENTS, exact=True
            ),
        )
        return [str(hit.value) for hit in found.hits]

    def _scroll(
        self, scope: models.Filter, offset: models.ExtendedPointId | None
    ) -> tuple[list[models.Record], models.ExtendedPointId | None]:
        return self._call(
            "read points",
            lambda: self._client.scroll(
                self._collection, scope, limit=BATCH_POINTS, offset=offset, with_vectors=True
            ),
        )

    def _query(
        self,
        query: list[float] | models.SparseVector,
        using: str,
        scope: VectorFilter,
        limit: int,
    ) -> list[VectorHit]:
        if not scope.collection_ids or (scope.document_ids is not None and not scope.document_ids):
            return []
        found = self._call(
            "search",
            lambda: self._client.query_points(
                self._collection, query, using=using, query_filter=_filter(scope), limit=limit
            ),
        )
        hits = []
        for point in found.points:
            payload = point.payload or {}
            hits.append(
                VectorHit(str(payload["document_id"]), int(payload["chunk_index"]), point.score)
            )
        return hits

    def _update(self, what: str, operation: Callable[[], models.UpdateResult]) -> None:
        result = self._call(what, operation)
        if result.status is not models.UpdateStatus.COMPLETED:
            raise VectorStoreUnavailable(
                f"the Qdrant server took the request to {what} and answered {result.status.value!r}"
                " instead of doing it: see its log and try again"
            )


def drop_collection(server: ServerAddress, collection: str) -> None:
    """Delete a collection that need not be there; see `QdrantServerIndex` for what is raised."""
    QdrantServerIndex(server, collection, RetryPolicy()).destroy()


def batches(points: Sequence[VectorPoint]) -> Iterator[list[models.PointStruct]]:
    """Cut points into requests of at most `BATCH_POINTS` points and `BATCH_BYTES` bytes."""
    batch: list[models.PointStruct] = []
    size = _ENVELOPE_BYTES
    for point in points:
        made = _point(point)
        more = len(made.model_dump_json(exclude_unset=True, exclude_none=True)) + 1
        if batch and (len(batch) == BATCH_POINTS or size + more > BATCH_BYTES):
            yield batch
            batch, size = [], _ENVELOPE_BYTES
        batch.append(made)
        size += more
    if batch:
        yield batch


def _point(point: VectorPoint) -> models.PointStruct:
    vectors: dict[str, models.Vector] = {DENSE: point.dense.tolist()}
    if point.sparse:
        vectors[SPARSE] = _sparse(point.sparse)
    payload = {
        "collection_id": point.collection_id,
        "document_id": point.document_id,
        "chunk_index": point.chunk_index,
    }
    return models.PointStruct(id=str(point.id), vector=vectors, payload=payload)


def _read(record: models.Record) -> VectorPoint:
    payload = record.payload or {}
    vectors = record.vector if isinstance(record.vector, dict) else {}
    sparse = vectors.get(SPARSE)
    weights = (
        dict(zip(sparse.indices, sparse.values, strict=True))
        if isinstance(sparse, models.SparseVector)
        else {}
    )
    return VectorPoint(
        str(payload["collection_id"]),
        str(payload["document_id"]),
        int(payload["chunk_index"]),
        np.array(vectors[DENSE], np.float32),
        weights,
    )


def _sparse(weights: Mapping[int, float]) -> models.SparseVector:
    return models.SparseVector(indices=list(weights.keys()), values=list(weights.values()))


def _one_document(collection_id: str, document_id: str) -> models.Filter:
    check_owner(collection_id, document_id)
    return models.Filter(
        must=[_is("collection_id", collection_id), _is("document_id", document_id)]
    )


def _filter(scope: VectorFilter) -> models.Filter:
    must: list[models.Condition] = [_is_one_of("collection_id", scope.collection_ids)]
    if scope.document_ids is not None:
        must.append(_is_one_of("document_id", scope.document_ids))
    if not scope.excluded_ids:
        return models.Filter(must=must)
    return models.Filter(must=must, must_not=[_is_one_of("document_id", scope.excluded_ids)])


def _is(key: str, value: str) -> models.FieldCondition:
    return models.FieldCondition(key=key, match=models.MatchValue(value=value))


def _is_one_of(key: str, values: Collection[str]) -> models.FieldCondition:
    return models.FieldCondition(key=key, match=models.MatchAny(any=sorted(values)))
