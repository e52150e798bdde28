"""The command line over a real library, with stand-ins for what takes seconds to load."""

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ragflash.cli import app
from ragflash.rag.library import Library
from tests.api.fakes import FakeEngine
from tests.rag.conftest import HashEmbedder, TextParser


class WordTokenizer:
    fingerprint = "0" * 64

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


class ClosableEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.dropped: list[str] = []

    async def drop_source(self, source_id: str) -> int:
        self.dropped.append(source_id)
        return 0

    def close(self) -> None:
        self.closed = True
        self.is_alive = False


@pytest.fixture
def engine() -> ClosableEngine:
    return ClosableEngine()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch, tmp_path: Path, data_dir: Path, engine: ClosableEngine) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setenv("RAGFLASH_DATA_DIR", str(data_dir))
    monkeypatch.setenv("RAGFLASH_MODEL", str(model))
    monkeypatch.setattr("ragflash.cli.parts.make_embedder", lambda settings: HashEmbedder())
    monkeypatch.setattr("ragflash.cli.parts._load_tokenizer", lambda settings: WordTokenizer())
    monkeypatch.setattr(Library, "open", partial(Library.open, parser=TextParser()))
    for module in ("parts", "model_host"):
        monkeypatch.setattr(
            f"ragflash.cli.{module}.start_model", lambda settings, archive=None: engine
        )


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Put back what `serve` configures: it logs to a stream that ends with its test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level


@pytest.fixture
def run() -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_json(run: Callable[..., Result]) -> Callable[..., dict]:
    def run_one(*arguments: object) -> dict:
        result = run(*arguments, "--json")
        assert result.stdout.count("\n") == 1, result.output
        return json.loads(result.stdout)

    return run_one


@pytest.fixture
def law(tmp_path: Path) -> Path:
    path = tmp_path / "law.txt"
    path.write_text("Records are kept for seven years.\fThey are then destroyed by the keeper.")
    return path
