"""The whole server is killed at any time; what it had acknowledged is there, once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.ingest.pdf_files import make_pdf, text_page

ROOT = Path(__file__).parents[2]
KILLS = 20
START_LIMIT_S = 120.0
LONGEST_LIFE_S = 4.0  # of a server that takes requests


def environment(data_dir: Path) -> dict[str, str]:
    roots = [ROOT / part for part in (".", "kernels", "ingest", "prompts")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
        "RAGFLASH_DATA_DIR": str(data_dir),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def serving(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server over the folder, and a client; it is killed at the end if nothing else ended it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ragflash", "serve", "--port", "0"],
        env=environment(data_dir),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        told = next(line for line in server.stderr if "ragflash answers at" in line)
        with httpx.Client(base_url=told.split()[-1], timeout=60) as client:
            yield server, client
    finally:
        server.kill()
        server.stderr.close()
        server.wait()


@dataclass
class Ledger:
    """What the server has acknowledged, by name of a file; a name is sent once."""

    kept: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)
    ids: dict[str, str] = field(default_factory=dict)

    def send(self, client: httpx.Client, name: str) -> bool:
        """Upload a file of two pages; whether the server took it."""
        pages = [text_page([f"{name} page {page} tells of canary{name}."] * 3) for page in (1, 2)]
        self.unsure.add(name)
        reply = client.post("/v1/documents", files={"file": (f"{name}.pdf", make_pdf(pages))})
        if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # the library is not open yet
            self.unsure.remove(name)
            return False
        assert reply.status_code == httpx.codes.ACCEPTED, reply.text
        self.unsure.remove(name)
        self.kept.add(name)
        self.ids[name] = reply.json()["document"]["id"]
        return True

    def delete(self, client: httpx.Client, name: str) -> None:
        self.kept.remove(name)
        self.unsure.add(name)
        reply = client.delete(f"/v1/documents/{self.ids[name]}")
        assert reply.status_code == httpx.codes.NO_CONTENT, reply.text
        self.unsure.remove(name)
        self.deleted.add(name)


def work_until_killed(client: httpx.Client, ledger: Ledger, life: int) -> None:
    """Send and delete until the server does not answer any more."""
    number = 0
    try:
        while True:
            if not ledger.send(client, f"x{life}x{number}"):
                time.sleep(0.05)
                continue
            if number % 4 == 3:
                ledger.delete(client, min(ledger.kept))
            number += 1
    except httpx.TransportError:
        return


def settle(client: httpx.Client) -> dict[str, dict]:
    """Wait until all work is done, and return the documents by name."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        reply = client.get("/v1/documents", params={"limit": 100})
        found = reply.json().get("data")
        if found is not None and all(entry["state"] in {"ready", "failed"} for entry in found):
            assert not reply.json()["has_more"]
            assert len({entry["name"] for entry in found}) == len(found), "something is there twice"
            return {entry["name"].removesuffix(".pdf"): entry for entry in found}
        time.sleep(0.2)
    raise AssertionError("work did not come to an end")


def check(client: httpx.Client, ledger: Ledger) -> None:
    found = settle(client)
    assert ledger.kept <= set(found), ledger.kept - set(found)
    assert not ledger.deleted & set(found)
    assert set(found) <= ledger.kept | ledger.unsure
    for name, entry in found.items():
        assert (entry["state"], entry["pages"]) == ("ready", 2), entry
        query = {"query": f"canary{name}", "mode": "sparse", "limit": 3}
        hits = client.post("/v1/search", json=query).json()["data"]
        assert hits[0]["document"] == entry["id"]
        assert client.delete(f"/v1/documents/{entry['id']}").status_code == 204


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_any_time_the_server_loses_nothing(tmp_path):
    chance, ledger, data_dir = random.Random(7), Ledger(), tmp_path / "data"
    for life in range(KILLS):
        with serving(data_dir) as (server, client):
            if life % 5 == 4:
                check(client, ledger)
                ledger = Ledger()
            killer = subprocess.Popen(
                ["sh", "-c", f"sleep {chance.uniform(0.2, LONGEST_LIFE_S)}; kill -9 {server.pid}"]
            )
            work_until_killed(client, ledger, life)
            killer.wait()
            assert server.wait() == -signal.SIGKILL
    with serving(data_dir) as (server, client):
        check(client, ledger)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    shown = subprocess.run(
        [sys.executable, "-m", "ragflash", "reconcile", "--dry-run", "--json"],
        env=environment(data_dir),
        check=False,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert not any(value for name, value in found.items() if name != "dry_run"), found
