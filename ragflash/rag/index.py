"""The contract of a vector store; its drivers are `index_edge` and `index_server`.

A point is a chunk: a dense vector, a sparse vector, and a payload of identifiers only. Text stays
in the catalogue, so that deleting it there deletes it.
"""

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

BATCH_POINTS = 256
DENSE, SPARSE = "dense", "sparse"
INDEXED_FIELDS = ("collection_id", "document_id")
MAX_DOCUMENTS = 1_000_000  # in one collection; what a store is asked to list at most

_NAMESPACE = uuid.UUID("6f1d3a52-5c0e-4f0b-9a54-3f0f0c1d7c11")


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

    def points(self, collection_id: str, document_id: str) -> Iterator[list[VectorPoint]]:
        """Read a document's points back, at most `BATCH_POINTS` at a time."""

    def flush(self) -> None:
        """Make everything written so far survive a power failure."""

    def tidy(self) -> None:
        """Do what has become due, if nobody is using the store; asked now and then."""

    def close(self) -> None:
        """Release the store; nothing may be called afterwards."""

    def destroy(self) -> None:
        """Remove the store with every point in it; nothing may be called afterwards."""


def check_owner(collection_id: str, document_id: str) -> None:
    """Raise `ValueError` unless both ids are given: a delete without a scope would be all."""
    if not collection_id or not document_id:
        raise ValueError("points are addressed by collection and document")
