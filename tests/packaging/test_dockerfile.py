"""The Dockerfile, read and, in the slow test, carried out."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.packaging import clean_root
from tests.packaging.clean_root import CleanRoot
from tests.packaging.dockerfile import Dockerfile, read

ROOT = Path(__file__).parents[2]
USER_ID = 10001
KEY = "correct-horse-battery"
READY_S = 300.0
STOP_S = 60.0
TERMINATED = 128 + signal.SIGTERM
TEXT = "Records are kept for seven years. They are then destroyed by the keeper."


@pytest.fixture(scope="module")
def image() -> Dockerfile:
    return read(ROOT / "Dockerfile")


def test_the_server_runs_without_rights_and_writes_to_its_volume_alone(image: Dockerfile):
    assert image.user == "ragflash"
    assert f"useradd --uid {USER_ID} " in " ".join(step.command for step in image.steps)
    assert image.folder == image.environment["HOME"] == image.environment["RAGFLASH_DATA_DIR"]
    assert (*image.entrypoint, *image.arguments) == ("ragflash", "serve")


def test_the_health_check_asks_whether_it_is_ready(image: Dockerfile):
    assert "/readyz" in image.healthcheck[-1]


class Container:
    """What an engine would start of the image, over one volume."""

    def __init__(self, root: CleanRoot, image: Dockerfile, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=120,
        )
        self.log = folder / "log"
        self._root, self._image = root, image
        self._environment = {"RAGFLASH_PORT": str(port), "RAGFLASH_API_KEY": KEY}
        self._volume = folder / "volume"
        self._volume.mkdir()
        os.chown(self._volume, USER_ID, USER_ID)

    def start(self, argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return self._root.start(
                argv, self._image, volume=self._volume, environment=self._environment, log=log
            )

    def serve(self) -> subprocess.Popen[bytes]:
        """Start the server, and return once the image's own health check passes."""
        server = self.start((*self._image.entrypoint, *self._image.arguments))
        deadline = time.monotonic() + READY_S
        while self.start(self._image.healthcheck).wait():
            assert server.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(1)
        return server


@pytest.fixture(scope="module")
def built(image: Dockerfile, tmp_path_factory):
    if reason := clean_root.missing():
        pytest.skip(f"no clean Debian root: {reason}")
    folder = tmp_path_factory.mktemp("container")
    root = CleanRoot(folder / "root", image.base)
    for step in image.steps:
        root.run(step, ROOT)
    container = Container(root, image, folder)
    yield container
    container.client.close()
    shutil.rmtree(folder / "root")


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_what_the_dockerfile_builds_serves(built: Container):
    server = built.serve()
    body = {"text": TEXT, "name": "law.txt"}
    added = built.client.post("/v1/documents?wait=60", json=body).json()
    assert added["document"]["state"] == "ready"
    reply = built.client.post("/v1/ask", json={"question": "How long are records kept?"}).json()
    assert reply["citations"][0]["quote"] == "Records are kept for seven years."
    assert reply["usage"]["prompt_tokens"] > 0, "the packaged model was asked"
    assert clean_root.stop(server, STOP_S) == TERMINATED
    server = built.serve()
    kept = built.client.get("/v1/documents").json()["data"]
    assert [document["id"] for document in kept] == [added["document"]["id"]]
    assert clean_root.stop(server, STOP_S) == TERMINATED
    for path in ("/opt/ragflash/written", "/src/written", "/etc/written"):
        assert built.start(("touch", path)).wait() != 0
