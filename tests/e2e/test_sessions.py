"""A document is read once, though the server is killed as soon as it has answered."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ragflash.samples import sample_path
from tests.processes import ROOT, environment

DOCUMENT = "bug-reporting.txt"


@contextmanager
def server(data_dir: Path) -> Iterator[httpx.Client]:
    """Serve from a process of its own, and kill it as `kill -9` does."""
    with subprocess.Popen(
        [sys.executable, "-m", "ragflash", "serve", "--port", "0"],
        cwd=ROOT,
        env=environment(RAGFLASH_DATA_DIR=str(data_dir)),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        address = re.search(r"http://\S+", process.stderr.readline())
        drain = threading.Thread(target=process.stderr.read)  # or its log would block
        drain.start()
        try:
            assert address is not None
            transport = httpx.HTTPTransport(retries=3)
            with httpx.Client(base_url=address[0], timeout=600, transport=transport) as client:
                yield client
        finally:
            process.kill()
            drain.join()


def post(client: httpx.Client, path: str, body: dict, **options: object) -> dict:
    """Send as a client should: again after a while as long as the server is not ready."""
    while (reply := client.post(path, json=body, **options)).status_code == 503:
        time.sleep(float(reply.headers["retry-after"]))
    assert reply.is_success, reply.text
    return reply.json()


def ask(client: httpx.Client, question: str, document_id: str) -> dict:
    body = {"question": question, "documents": [document_id], "mode": "full"}
    return post(client, "/v1/ask", body)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_server_has_read_its_document(tmp_path):
    with server(tmp_path) as client:
        text = {"text": sample_path(DOCUMENT).read_text(encoding="utf-8"), "name": DOCUMENT}
        record = post(client, "/v1/documents", text, params={"wait": 60})["document"]
        first = ask(client, "How can I suppress the acknowledgement mail?", record["id"])
        assert first["usage"]["cached_tokens"] == 0
    assert list((tmp_path / "sessions").glob("*/*.segment")) != []
    with server(tmp_path) as client:
        question = "Which command do Emacs users have for reporting a bug?"
        second = ask(client, question, record["id"])
        assert second["usage"]["cached_tokens"] >= record["tokens"]
        assert second["answered"]
        assert second["timings"]["prompt_n"] < 200
        assert client.delete(f"/v1/documents/{record['id']}").status_code == 204
        segments = list((tmp_path / "sessions").glob("*/*.segment"))
        assert len(segments) == 1, "the rules"
