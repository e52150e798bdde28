"""A model hub on loopback: what huggingface_hub asks for, and faults on demand."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Holds repositories of files.

    Attributes:
        repos: Name to files.
        gated: Repositories that want consent.
        cut_at: Bytes after which a download breaks off, once; `None` never.
        damaged: Whether other bytes are sent than were promised.
        ranges: What `Range` headers asked for, one entry a download.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.cut_at: int | None = None
        self.damaged = False
        self.ranges: list[str | None] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: downloads that break off are what is tested."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            self._describe(path.removeprefix("api/models/"))
            return
        repo, _, rest = path.partition("/resolve/")
        name = rest.partition("/")[2]
        if repo in self.server.gated:
            self._refuse(403, "GatedRepo")
        elif name not in self.server.repos.get(repo, {}):
            self._refuse(404, "EntryNotFound")
        else:
            self._send_file(self.server.repos[repo][name], with_body=with_body)

    def _describe(self, repo: str) -> None:
        import json

        if repo in self.server.gated:
            self._refuse(403, "GatedRepo")
            return
        if repo not in self.server.repos:
            self._refuse(404, "RepoNotFound")
            return
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": _sha256(data), "size": len(data), "pointerSize": 134},
            }
            for name, data in self.server.repos[repo].items()
        ]
        body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _send_file(self, data: bytes, *, with_body: bool) -> None:
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{_sha256(data)}"',
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(data) - start),
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if start else 200, headers)
        if not with_body:
            return
        self.server.ranges.append(asked)
        sent = bytes(len(data)) if self.server.damaged else data
        cut, self.server.cut_at = self.server.cut_at, None
        self.wfile.write(sent[start:cut])
        if cut is not None:
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, {"X-Error-Code": code, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
