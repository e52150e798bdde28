"""A server in a process of its own, and what it holds of the machine."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx

from tests.processes import ROOT, environment

START_S = 60.0
STOP_S = 30.0
SETTLED = frozenset({"ready", "partial", "failed"})


class Server:
    """Runs over `folder`: data, temporary files and log lie in it, over several lives."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.temporary = folder / "tmp"
        self.log = folder / "log"
        self._model = folder / "model.gguf"
        self._model.write_bytes(b"GGUF")
        self.temporary.mkdir()
        self.process: subprocess.Popen[bytes]
        self.client = httpx.Client()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind when a test has failed."""
        self.client.close()
        if self.process.poll() is None:
            self.kill()

    def start(self) -> None:
        """Start it; it may not answer yet."""
        own = {
            "RAGFLASH_DATA_DIR": str(self.data),
            "RAGFLASH_MODEL": str(self._model),
            "RAGFLASH_PORT": "0",
            "TMPDIR": str(self.temporary),
        }
        others = environment()
        left = {name: others[name] for name in others if not name.startswith("RAGFLASH_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.server", "serve"],
                cwd=ROOT,
                env=left | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Wait until documents are taken and questions answered."""
        deadline = time.monotonic() + START_S
        while "answers at" not in self.log.read_text():
            self._check(deadline)
        told = self.log.read_text().partition("answers at ")[2].split()[0]
        self.client.close()
        self.client = httpx.Client(base_url=told, timeout=60)
        while self.client.get("/readyz").status_code != 200:
            self._check(deadline)

    def _check(self, deadline: float) -> None:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        assert time.monotonic() < deadline, self.log.read_text()[-4000:]
        time.sleep(0.05)

    def kill(self) -> None:
        """Kill it and nothing else, and see that nothing it had started lives on."""
        self.process.kill()
        self.process.wait()
        self._await_end_of_session()

    def stop(self) -> None:
        """End it as a supervisor does."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_S) == 128 + signal.SIGTERM
        self._await_end_of_session()

    def _await_end_of_session(self) -> None:
        deadline = time.monotonic() + STOP_S
        while left := list(self.members()):
            assert time.monotonic() < deadline, f"{left} outlived the server"
            time.sleep(0.05)

    def members(self) -> Iterator[tuple[int, str]]:
        """Process ids and states (`Z` is a zombie) of the server and what it has started."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                _, _, rest = path.read_text().rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, _, session = rest.split()[:4]
            if int(session) == self.process.pid:
                yield int(path.parent.name), state

    def resident_bytes(self) -> int:
        """Memory of the server's own that is in RAM, pages of mapped files not counted."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    def count_files(self) -> int:
        """Open file descriptors."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def documents(self) -> list[dict]:
        """All documents."""
        found: list[dict] = []
        while True:
            after = {"after": found[-1]["id"]} if found else {}
            reply = self.client.get("/v1/documents", params={"limit": 100, **after})
            found += reply.raise_for_status().json()["data"]
            if not reply.json()["has_more"]:
                return found

    def await_settled(self, timeout_s: float = 120.0) -> list[dict]:
        """Wait until nothing is being worked on; return all documents."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.documents()
            if all(document["state"] in SETTLED for document in found):
                return found
            assert time.monotonic() < deadline, [d for d in found if d["state"] not in SETTLED]
            time.sleep(0.1)
