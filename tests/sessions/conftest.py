from collections.abc import Iterator
from pathlib import Path

import pytest

from ragflash.sessions import SessionFolder
from tests.sessions.samples import open_folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture
def folder(path: Path) -> Iterator[SessionFolder]:
    folder = open_folder(path)
    yield folder
    folder.close()
