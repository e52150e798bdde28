"""Many files of all kinds through one server: its memory stays, and nothing is left lying about."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.soak.mixed_files import File, make
from tests.soak.running import Server

MOST_GROWTH = 0.10  # of the memory after a quarter of the files
AT_ONCE = 50


def put_in(server: Server, files: Iterator[File], count: int) -> None:
    """Upload files, and see that each becomes what it should."""
    for start in range(0, count, AT_ONCE):
        given: dict[str, File] = {}
        for file in islice(files, min(AT_ONCE, count - start)):
            upload = {"file": (file.name, file.content)}
            reply = server.client.post("/v1/documents", files=upload)
            assert reply.status_code == 202, (file.name, reply.text)
            given[reply.json()["document"]["id"]] = file
        documents = {document["id"]: document for document in server.await_settled()}
        for document_id, file in given.items():
            document = documents[document_id]
            told = (file.name, document["state"], document["reason"])
            assert told == (file.name, "failed" if file.reason else "ready", file.reason)
            assert bool(document["chunks"]) == (file.reason is None), file.name


def soak(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Put `count` files in; return what was held after a quarter of them and after all."""
    files = make(count, seed)
    with Server(folder) as server:
        server.start()
        server.await_ready()
        put_in(server, files, count // 4)
        before = server.resident_bytes(), server.count_files()
        put_in(server, files, count - count // 4)
        after = server.resident_bytes(), server.count_files()
        processes = list(server.members())
        num_documents = len(server.documents())
        server.stop()
    assert all(state != "Z" for _, state in processes), processes
    assert list(server.temporary.iterdir()) == []
    assert list((server.data / "incoming").iterdir()) == []
    return {
        "documents": num_documents,
        "early_bytes": before[0],
        "late_bytes": after[0],
        "early_files": before[1],
        "late_files": after[1],
        "processes": len(processes),
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_1000_files_with_flat_memory(tmp_path: Path, record_testsuite_property):
    held = soak(tmp_path, 1000, seed=2)
    for name, value in held.items():
        record_testsuite_property(name, value)
    assert held["documents"] == 1000
    assert held["late_bytes"] <= held["early_bytes"] * (1 + MOST_GROWTH), held
    assert held["late_files"] <= held["early_files"] + 2, held
