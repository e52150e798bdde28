"""`ragflash doctor` finds what is wrong and says what to do."""

import importlib.metadata
import shutil
import socket
import threading
from types import SimpleNamespace

import pytest
from gguf import GGUFWriter

from ragflash.cli import checks
from ragflash.cli.checks import CHECKS, Level, examine
from ragflash.engine.cards import Card
from ragflash.rag.files import FolderLock
from ragflash.settings import load_settings
from tests.tiny import write_tiny_llama


@pytest.fixture
def healthy(monkeypatch, packaged_model_path) -> None:
    """A machine on which nothing is wrong, whatever this one is like."""
    monkeypatch.setenv("RAGFLASH_MODEL", str(packaged_model_path))
    monkeypatch.setenv("RAGFLASH_PORT", "0")
    installed = {"torch": "2.13.0+cpu", "numpy": "2.3.1"}
    required = ["torch==2.13.0", "numpy<2.5,>=2.2", 'pytest<10; extra == "test"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: missing_or(installed, name))
    usage = SimpleNamespace(free=20 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(checks, "_available_bytes", lambda: 16 << 30)


def missing_or(installed: dict[str, str], name: str) -> str:
    if name not in installed:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed[name]


def finding(name: str) -> checks.Finding:
    (found,) = examine(load_settings(), {name: CHECKS[name]})
    return found


def test_a_healthy_machine(healthy, run, run_json) -> None:
    body = run_json("doctor")
    assert body["ok"] is True
    assert [check["name"] for check in body["checks"]] == list(CHECKS)
    assert {check["level"] for check in body["checks"]} == {"ok"}
    result = run("doctor")
    assert result.exit_code == 0
    assert "ok   model: SmolLM2" in result.stdout
    assert "→" not in result.stdout


def test_nothing_is_created(healthy, run, data_dir) -> None:
    run("doctor")
    assert not data_dir.exists()


def test_a_fault_makes_the_exit_code_1_and_comes_with_advice(healthy, run, tmp_path) -> None:
    result = run("doctor", "--model", tmp_path / "none.gguf")
    assert result.exit_code == 1
    assert "fail model: there is no model file at" in result.stdout
    assert "→ name a GGUF file" in result.stdout
    assert "ok   port" in result.stdout, "the other checks go on"


def test_models_that_cannot_run(healthy, monkeypatch, tmp_path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    monkeypatch.setenv("RAGFLASH_MODEL", str(damaged))
    assert finding("model").level is Level.FAIL
    monkeypatch.setenv("RAGFLASH_MODEL", str(write_tiny_llama(tmp_path / "bare.gguf", 1)))
    assert "tokenizer" in finding("model").said
    writer = GGUFWriter(tmp_path / "unknown.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setenv("RAGFLASH_MODEL", str(tmp_path / "unknown.gguf"))
    found = finding("model")
    assert found.level is Level.FAIL
    assert "mamba" in found.said


def test_a_pre_tokenizer_that_is_not_known(healthy, monkeypatch) -> None:
    monkeypatch.setenv("RAGFLASH_PRE_TOKENIZER", "somebodys")
    found = finding("model")
    assert found.level is Level.FAIL
    assert "pre_tokenizer = 'somebodys': ragflash knows default" in found.said


def test_a_model_without_a_chat_template_is_said(healthy, monkeypatch, gemma_model_path) -> None:
    monkeypatch.setenv("RAGFLASH_MODEL", str(gemma_model_path))
    found = finding("model")
    assert found.level is Level.OK
    assert "gets the one that is built-in gemma3" in found.said


def test_packages(healthy, monkeypatch) -> None:
    installed = {"torch": "2.12.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: missing_or(installed, name))
    found = finding("packages")
    assert (found.level, found.said) == (Level.FAIL, "not installed: numpy")
    installed["numpy"] = "2.3"
    found = finding("packages")
    assert (found.level, found.said) == (Level.WARN, "torch 2.12.0 instead of 2.13.0")

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", not_installed)
    assert finding("packages").level is Level.WARN


def test_embedding_models(healthy, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RAGFLASH_EMBED_MODEL", str(tmp_path))
    found = finding("embedder")
    assert found.level is Level.FAIL
    assert "modules.json" in found.said
    (tmp_path / "modules.json").write_text("{broken")
    assert finding("embedder").level is Level.FAIL


def test_data_folders(healthy, monkeypatch, data_dir, tmp_path) -> None:
    lock = FolderLock.acquire(data_dir)
    found = finding("data")
    lock.release()
    assert found.level is Level.WARN
    assert "in use by process" in found.said
    assert finding("data").level is Level.OK
    for free, level in ((500 << 20, Level.WARN), (50 << 20, Level.FAIL)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert finding("data").level is level
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RAGFLASH_DATA_DIR", str(tmp_path / "file" / "data"))
    assert finding("data").level is Level.FAIL


@pytest.mark.parametrize(
    ("status", "level"), [("200 OK", Level.OK), ("503 Service Unavailable", Level.FAIL)]
)
def test_vector_servers(healthy, monkeypatch, status: str, level: Level) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_once() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(4096).startswith(b"GET /readyz ")
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=answer_once)
        thread.start()
        port = listener.getsockname()[1]
        monkeypatch.setenv("RAGFLASH_QDRANT_URL", f"http://127.0.0.1:{port}")
        assert finding("vectors").level is level
        thread.join(10)
    found = finding("vectors")
    assert found.level is Level.FAIL, "nobody listens any more"
    assert "RAGFLASH_QDRANT_URL" in found.advice


def test_ports(healthy, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("RAGFLASH_PORT", str(taken.getsockname()[1]))
        assert finding("port").level is Level.WARN
    monkeypatch.setenv("RAGFLASH_HOST", "0.0.0.0")
    found = finding("port")
    assert found.level is Level.FAIL
    assert "RAGFLASH_API_KEY" in found.said


def test_processors(healthy, monkeypatch) -> None:
    monkeypatch.setenv("RAGFLASH_DTYPE", "bfloat16")
    for multiplies, level in ((True, Level.OK), (False, Level.WARN)):
        monkeypatch.setattr(
            "ragflash.models.registry.cpu_multiplies_bfloat16", lambda found=multiplies: found
        )
        assert finding("cpu").level is level


def test_cards(healthy, monkeypatch) -> None:
    monkeypatch.setattr(checks, "list_cards", lambda: ())
    assert finding("card").said == "none is seen; the processor is used"
    monkeypatch.setenv("RAGFLASH_DEVICE", "cuda")
    assert finding("card").level is Level.FAIL
    card = Card("NVIDIA GeForce RTX 3090", 24 << 30, 1 << 30, "8.6", "580.1")
    monkeypatch.setattr(checks, "list_cards", lambda: (card,))
    monkeypatch.setattr("ragflash.engine.device.require_card", lambda: None)
    monkeypatch.setattr("ragflash.engine.device.usable_bytes", lambda vram: vram or 23 << 30)
    found = finding("card")
    assert found.level is Level.OK
    assert "RTX 3090, 24 GiB of which 1.0 are taken, compute capability 8.6" in found.said
    assert "8,192 tokens of context in q8_0" in found.said
    monkeypatch.setenv("RAGFLASH_VRAM_GB", "1.5")
    assert "GiB are there" in finding("card").said
    monkeypatch.setenv("RAGFLASH_DEVICE", "auto")
    assert finding("card").level is Level.WARN
    monkeypatch.setenv("RAGFLASH_DEVICE", "cpu")
    assert finding("card").level is Level.OK


@pytest.mark.parametrize(
    ("available", "level"), [(2 << 30, Level.OK), (1100 << 20, Level.WARN), (1 << 29, Level.FAIL)]
)
def test_memory(healthy, monkeypatch, available: int, level: Level) -> None:
    monkeypatch.setattr(checks, "_available_bytes", lambda: available)
    assert finding("memory").level is level


def test_this_machines_memory_is_found() -> None:
    assert checks._available_bytes() > 0
