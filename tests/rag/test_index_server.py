"""What only the server's driver does: batches, keys, faults on the way, and how it tells them."""

import socket

import numpy as np
import pytest
from qdrant_client import models

from ragflash.errors import Conflict, SettingInvalid, StorageError, VectorStoreUnavailable
from ragflash.rag.index import BATCH_POINTS, INDEXED_FIELDS, VectorPoint
from ragflash.rag.index_server import BATCH_BYTES, QdrantServerIndex, batches
from ragflash.rag.placement import ServerAddress
from ragflash.rag.server_calls import RetryPolicy
from tests.rag.qdrant_stub import MAX_BODY_BYTES, Fault
from tests.rag.store_scenarios import EVERYTHING, point

QUICK = RetryPolicy(attempts=3, first_s=0.0)
NAME = "ragflash_a_b"


@pytest.fixture
def open_index(qdrant):
    opened = []

    def open_one(**changes) -> QdrantServerIndex:
        chosen = {"url": qdrant.url, "timeout_s": 30, "api_key": None, **changes}
        index = QdrantServerIndex.open(ServerAddress(**chosen), NAME, 4, retry=QUICK)
        opened.append(index)
        return index

    yield open_one
    for index in opened:
        index.close()


def large_points(count: int, dim: int = 3000) -> list[VectorPoint]:
    rows = np.random.default_rng(7).standard_normal((count, dim)).astype(np.float32)
    return [VectorPoint("c", "d", at, row, {at: 0.5}) for at, row in enumerate(rows)]


def test_requests_are_bounded_in_number_and_size():
    points = large_points(200)
    cut = list(batches(points))
    assert [made.id for batch in cut for made in batch] == [str(p.id) for p in points]
    assert len(cut) > 1
    small = [point("d", chunk) for chunk in range(2 * BATCH_POINTS + 1)]
    assert [len(batch) for batch in batches(small)] == [BATCH_POINTS, BATCH_POINTS, 1]
    assert list(batches([])) == []


def test_the_size_that_is_counted_is_the_size_that_is_sent(qdrant):
    index = QdrantServerIndex.open(ServerAddress(qdrant.url), NAME, 3000, retry=QUICK)
    points = large_points(150)
    qdrant.requests.clear()
    index.upsert(points)
    sent = qdrant.bodies("/points")
    assert len(sent) == len(list(batches(points))) > 1
    assert BATCH_BYTES - 100_000 < max(sent) <= BATCH_BYTES < MAX_BODY_BYTES
    assert index.count("c", "d") == 150
    index.close()


def test_a_body_that_the_server_finds_too_large_is_told(open_index, monkeypatch, qdrant):
    monkeypatch.setattr("tests.rag.qdrant_stub.MAX_BODY_BYTES", 5_000)
    index = open_index()
    qdrant.requests.clear()
    with pytest.raises(VectorStoreUnavailable, match=r"answered 413: .*too large"):
        index.upsert([point("d", chunk) for chunk in range(100)])
    assert len(qdrant.bodies("/points")) == 1


def test_fields_are_indexed_when_the_collection_is_made(open_index, qdrant):
    open_index()
    assert qdrant.collections[NAME].fields == set(INDEXED_FIELDS)


def test_an_index_that_a_crash_left_out_is_made_at_the_next_start(open_index, qdrant):
    open_index().close()
    qdrant.collections[NAME].fields.remove("document_id")
    index = open_index()
    assert index.count("c", "d") == 0


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.CUT, Fault.LOST_REPLY])
def test_passing_faults_are_waited_out(open_index, qdrant, fault):
    index = open_index()
    qdrant.order(fault, times=2)
    index.upsert([point("d", 0, t7=1.0), point("d", 1)])
    assert index.count("c", "d") == 2
    qdrant.order(fault, times=2)
    index.delete_document("c", "d")
    qdrant.order(fault, times=2)
    assert index.documents() == set()
    qdrant.order(fault, times=2)
    assert index.query_sparse({7: 1.0}, EVERYTHING, 10) == []


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.CUT])
def test_a_fault_that_stays_is_told_with_what_to_do(open_index, qdrant, fault):
    index = open_index()
    qdrant.order(fault, times=QUICK.attempts)
    says = {Fault.UNAVAILABLE: "answered 503", Fault.CUT: "RAGFLASH_QDRANT_URL"}
    with pytest.raises(VectorStoreUnavailable, match=f"could not count points.*{says[fault]}"):
        index.count("c", "d")
    assert len(qdrant.requests) == QUICK.attempts
    assert index.count("c", "d") == 0


def test_an_answer_that_does_not_come_is_not_waited_for_longer_than_set(open_index, qdrant):
    index = open_index(timeout_s=1)
    qdrant.order(Fault.NO_ANSWER)
    assert index.count("c", "d") == 0
    assert len(qdrant.requests) == 2


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST_REPLY])
@pytest.mark.parametrize("after", range(5))
def test_opening_survives_a_fault_at_every_request(open_index, qdrant, fault, after):
    qdrant.faults += [None] * after + [fault]
    index = open_index()
    assert qdrant.faults == []
    assert qdrant.collections[NAME].fields == set(INDEXED_FIELDS)
    assert index.documents() == set()


def test_a_server_that_is_not_there_is_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(VectorStoreUnavailable, match=f"127.0.0.1:{port}.*see that it runs"):
        QdrantServerIndex.open(ServerAddress(f"http://127.0.0.1:{port}"), NAME, 4, retry=QUICK)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_refused_key_is_told_at_once_and_never_shown(open_index, qdrant, key):
    qdrant.api_key = "the-right-key"
    with pytest.raises(VectorStoreUnavailable, match=r"401.*RAGFLASH_QDRANT_API_KEY") as caught:
        open_index(api_key=key)
    assert len(qdrant.requests) == 1
    assert "wrong" not in str(caught.value)
    assert open_index(api_key="the-right-key").documents() == set()


@pytest.mark.parametrize("key", ["secret\n", "se cret", "sécret", ""])
def test_a_key_that_cannot_be_sent_is_told_and_not_shown(key):
    with pytest.raises(SettingInvalid, match="RAGFLASH_QDRANT_API_KEY") as caught:
        ServerAddress("http://127.0.0.1", key)
    assert "cret" not in str(caught.value)


def test_an_address_with_an_impossible_port_is_told():
    with pytest.raises(SettingInvalid, match="RAGFLASH_QDRANT_URL"):
        QdrantServerIndex.open(ServerAddress("http://127.0.0.1:99999"), NAME, 4)


def test_an_address_does_not_show_its_key():
    assert "secret" not in repr(ServerAddress("http://127.0.0.1", "secret"))


def test_what_the_server_refuses_is_not_tried_again(open_index, qdrant):
    index = open_index()
    qdrant.drop(NAME)
    qdrant.requests.clear()
    with pytest.raises(VectorStoreUnavailable, match=r"answered 404: .*doesn't exist"):
        index.count("c", "d")
    assert len(qdrant.requests) == 1


def test_points_that_did_not_arrive_are_noticed(open_index, monkeypatch):
    index = open_index()
    done = models.UpdateResult(operation_id=1, status=models.UpdateStatus.COMPLETED)
    monkeypatch.setattr(index._client, "upsert", lambda *_: done)
    with pytest.raises(VectorStoreUnavailable, match="confirmed 1 points and holds 0"):
        index.upsert([point("d")])


def test_a_write_that_was_only_taken_note_of_is_not_a_write(open_index, monkeypatch):
    index = open_index()
    noted = models.UpdateResult(operation_id=1, status=models.UpdateStatus.ACKNOWLEDGED)
    monkeypatch.setattr(index._client, "delete", lambda *_: noted)
    with pytest.raises(VectorStoreUnavailable, match="'acknowledged'"):
        index.delete_document("c", "d")


def test_a_collection_of_somebody_else_is_left_alone(qdrant, open_index):
    open_index().close()
    held = qdrant.collections[NAME]
    held.params = models.CollectionParams(
        vectors=models.VectorParams(size=4, distance=models.Distance.COSINE)
    )
    with pytest.raises(StorageError, match="was not made by ragflash"):
        open_index()


def test_a_collection_that_is_lost_is_not_made_anew(qdrant):
    with pytest.raises(Conflict, match="has no collection 'ragflash_a_b'"):
        QdrantServerIndex.open(ServerAddress(qdrant.url), NAME, 4, create=False, retry=QUICK)
    assert qdrant.collections == {}


def test_pauses_grow_and_are_bounded():
    policy = RetryPolicy(attempts=8, first_s=1.0, longest_s=4.0)
    for _ in range(50):
        pauses = list(policy.pauses())
        assert len(pauses) == 7
        assert all(0 <= p <= bound for p, bound in zip(pauses, [1, 2, 4, 4, 4, 4, 4], strict=True))
    assert len({next(policy.pauses()) for _ in range(20)}) > 1


def test_a_document_is_deleted_with_one_request_whatever_its_size(open_index, qdrant):
    index = open_index()
    index.upsert([point("d", chunk) for chunk in range(3 * BATCH_POINTS)])
    index.upsert([point("e")])
    qdrant.requests.clear()
    index.delete_document("c", "d")
    assert len(qdrant.requests) == 1
    assert index.documents() == {("c", "e")}
