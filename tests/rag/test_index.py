"""The scenarios on every driver; a real Qdrant server's address is `RAGFLASH_TEST_QDRANT_URL`."""

import os
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from ragflash.errors import StorageError
from ragflash.rag.index import VectorIndex
from ragflash.rag.index_edge import QdrantEdgeIndex
from ragflash.rag.index_server import QdrantServerIndex
from ragflash.rag.placement import ServerAddress
from tests.rag.store_scenarios import OpenStore, StoreScenarios

REAL_SERVER = os.environ.get("RAGFLASH_TEST_QDRANT_URL")
REAL_KEY = os.environ.get("RAGFLASH_TEST_QDRANT_API_KEY")


class TestEmbedded(StoreScenarios):
    @pytest.fixture
    def open_store(self, tmp_path) -> Iterator[OpenStore]:
        opened: list[VectorIndex] = []

        def open_one(dim: int = 4, name: str = "own") -> VectorIndex:
            opened.append(QdrantEdgeIndex.open(tmp_path / name, dim))
            return opened[-1]

        yield open_one
        for index in opened:
            index.close()

    def test_has_one_owner(self, open_store, index):
        with pytest.raises(StorageError, match="cannot be opened"):
            open_store()


def open_on(server: ServerAddress) -> tuple[OpenStore, Callable[[], None]]:
    """Open collections with names of this test's own; the second function removes them."""
    prefix = f"ragflash_test_{uuid4().hex}"
    opened: list[VectorIndex] = []
    names: set[str] = set()

    def open_one(dim: int = 4, name: str = "own") -> VectorIndex:
        names.add(name)
        opened.append(QdrantServerIndex.open(server, f"{prefix}_{name}", dim))
        return opened[-1]

    def remove() -> None:
        for index in opened:
            index.close()
        for name in names:
            QdrantServerIndex.open(server, f"{prefix}_{name}", 4).destroy()

    return open_one, remove


class TestServer(StoreScenarios):
    @pytest.fixture
    def open_store(self, qdrant) -> Iterator[OpenStore]:
        open_one, remove = open_on(ServerAddress(qdrant.url))
        yield open_one
        remove()


@pytest.mark.skipif(REAL_SERVER is None, reason="RAGFLASH_TEST_QDRANT_URL is not set")
class TestRealServer(StoreScenarios):
    @pytest.fixture
    def open_store(self) -> Iterator[OpenStore]:
        open_one, remove = open_on(ServerAddress(str(REAL_SERVER), REAL_KEY))
        yield open_one
        remove()
