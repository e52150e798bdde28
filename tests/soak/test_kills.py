"""The whole server, killed at any moment: what it acknowledged is there, once."""

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from ragflash.rag.library import Library, LibraryConfig
from tests.soak.running import Server
from tests.soak.server import Embedder

NUM_CLIENTS = 3
FILLING = "Filling words that nobody asks for stand here. " * 40


@dataclass
class Diary:
    """What clients know: the fate of every text whose upload was begun, by its one odd word."""

    acknowledged: dict[str, str] = field(default_factory=dict)
    uncertain: set[str] = field(default_factory=set)
    deleted: dict[str, str] = field(default_factory=dict)
    dying: dict[str, str] = field(default_factory=dict)
    replies: int = 0


class Client(threading.Thread):
    """Uploads, deletes, searches and asks until the server is gone."""

    def __init__(self, address: str, name: str, diary: Diary) -> None:
        super().__init__()
        self.failure: AssertionError | None = None
        self._address = address
        self._own = name
        self._diary = diary
        self._chance = random.Random(name)

    def run(self) -> None:
        with httpx.Client(base_url=self._address, timeout=30) as client:
            try:
                for number in range(1000):
                    self._put_in(client, f"canary{self._own}n{number}x")
                    self._look(client)
                    if self._chance.random() < 0.3:
                        self._take_out(client)
            except httpx.HTTPError:
                return  # it was killed
            except AssertionError as error:
                self.failure = error

    def _put_in(self, client: httpx.Client, word: str) -> None:
        parts = [f"{word} part {at}. {FILLING}" for at in range(self._chance.randrange(1, 6))]
        self._diary.uncertain.add(word)
        reply = client.post(
            "/v1/documents",
            files={"file": (f"{word}.txt", "\n\n".join(parts).encode())},
            params={"wait": self._chance.choice([0, 0, 5])},
        )
        assert reply.status_code == 202, reply.text
        self._diary.acknowledged[word] = reply.json()["document"]["id"]
        self._diary.uncertain.discard(word)
        self._diary.replies += 1

    def _look(self, client: httpx.Client) -> None:
        for path, body in (
            ("/v1/search", {"query": "filling words"}),
            ("/v1/ask", {"question": "What stands here?", "use_engine": False}),
        ):
            status = client.post(path, json=body).status_code
            assert status == 200, (path, status)
            self._diary.replies += 1

    def _take_out(self, client: httpx.Client) -> None:
        own = [word for word in self._diary.acknowledged if f"canary{self._own}n" in word]
        if not own:
            return
        word = self._chance.choice(own)
        self._diary.dying[word] = self._diary.acknowledged.pop(word)
        assert client.delete(f"/v1/documents/{self._diary.dying[word]}").status_code == 204
        self._diary.deleted[word] = self._diary.dying.pop(word)
        self._diary.replies += 1


def check(server: Server, diary: Diary) -> None:
    """Compare what a server has after its recovery with what its clients were told."""
    documents = server.await_settled()
    names = [document["name"].removesuffix(".txt") for document in documents]
    assert len(set(names)) == len(names), "a document is there twice"
    found = dict(zip(names, documents, strict=True))
    for word, document_id in diary.acknowledged.items():
        assert found[word]["id"] == document_id, f"{word} was acknowledged"
    for word, document_id in diary.deleted.items():
        assert word not in found, f"{word} was deleted"
        assert server.client.get(f"/v1/documents/{document_id}").status_code == 404
    for word, document in found.items():
        assert word in diary.acknowledged.keys() | diary.dying.keys() | diary.uncertain, word
        assert document["state"] == "ready", document
        assert document["chunks"] > 0
    for word in diary.acknowledged | diary.deleted:
        query = {"query": word, "mode": "sparse", "limit": 100}
        hits = server.client.post("/v1/search", json=query).raise_for_status().json()["data"]
        holders = {hit["document"] for hit in hits if word in hit["text"]}
        assert holders == ({found[word]["id"]} if word in found else set()), word


def remove_all(server: Server) -> None:
    for document in server.documents():
        assert server.client.delete(f"/v1/documents/{document['id']}").status_code == 204


def live(server: Server, diary: Diary, life: int, seconds: float) -> None:
    """Serve clients for a while, and be killed."""
    address = str(server.client.base_url)
    clients = [Client(address, f"l{life}c{at}", diary) for at in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(seconds)
    server.kill()
    for client in clients:
        client.join(60)
        assert client.failure is None, client.failure


def kill_and_check(folder: Path, *, kills: int, seed: int) -> int:
    """Kill a server that often, every fourth time while it starts; return its replies."""
    chance = random.Random(seed)
    diary, replies = Diary(), 0
    with Server(folder) as server:
        for life in range(kills):
            server.start()
            if life % 4 == 3:
                time.sleep(chance.uniform(0.0, 4.0))
                server.kill()
                continue
            server.await_ready()
            check(server, diary)
            remove_all(server)
            replies, diary = replies + diary.replies, Diary()
            live(server, diary, life, chance.uniform(0.0, 6.0))
        server.start()
        server.await_ready()
        check(server, diary)
        server.stop()
    assert list(server.temporary.iterdir()) == []
    found = Library.reconcile(LibraryConfig(server.data), Embedder(), dry_run=True)
    assert found.is_clean, found
    return replies + diary.replies


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_20_kills_lose_nothing_and_double_nothing(tmp_path, record_testsuite_property):
    replies = kill_and_check(tmp_path, kills=20, seed=7)
    record_testsuite_property("replies", replies)
    assert replies > 100
