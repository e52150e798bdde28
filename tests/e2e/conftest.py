"""The README's session is run once; what follows uses the library that it leaves."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from ragflash.cli.parts import SCOPE, library_and_engine
from ragflash.engine.client import EngineClient
from ragflash.rag import evaluate
from ragflash.rag.answer import Answerer
from ragflash.rag.library import Library
from ragflash.rag.records import DEFAULT_COLLECTION, DocumentRecord
from ragflash.settings import load_settings
from tests.processes import ROOT, environment


@dataclass(frozen=True)
class Session:
    """Commands and outputs as the README shows them, and as they came."""

    data_dir: Path
    shown: list[tuple[str, str]]
    printed: list[tuple[str, str]]


@dataclass(frozen=True)
class Story:
    """All sample documents in one library, with the packaged model."""

    library: Library
    engine: EngineClient
    answerer: Answerer
    questions: list[evaluate.EvalQuestion]
    records: dict[str, DocumentRecord]


def readme_session() -> list[tuple[str, str]]:
    """Cut the README's console block into commands and their outputs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```console\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block is not None
    steps = re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (step.partition("\n") for step in steps)]


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    data_dir = tmp_path_factory.mktemp("session")
    printed = []
    shown = readme_session()
    for command, _ in shown:
        program, *arguments = shlex.split(command)
        assert program == "ragflash"
        ran = subprocess.run(
            [sys.executable, "-m", "ragflash", *arguments],
            cwd=ROOT,
            env=environment(RAGFLASH_DATA_DIR=str(data_dir)),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=1200,
        )
        printed.append((command, ran.stdout))
    return Session(data_dir, shown, printed)


@pytest.fixture(scope="session")
def story(session: Session, sample_dir: Path) -> Iterator[Story]:
    questions = evaluate.read_questions(sample_dir)
    settings = load_settings(data_dir=session.data_dir)
    with library_and_engine(settings) as (library, engine), closing(library):
        assert engine is not None
        records = evaluate.ingest(library, SCOPE, DEFAULT_COLLECTION, sample_dir, questions)
        answerer = Answerer(library, engine, fence_key=b"the same every time")
        yield Story(library, engine, answerer, questions, records)
