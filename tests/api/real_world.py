"""The routes over a real library, with stand-ins for both models."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ragflash.api.deps import Asker
from ragflash.rag.ingest import DocumentParser
from ragflash.rag.library import Library, LibraryConfig
from ragflash.sessions import ArchiveCounts
from tests.api.fakes import FakeAnswerer, World
from tests.rag.conftest import HashEmbedder


@contextmanager
def real_world(
    folder: Path,
    parser: DocumentParser | None,
    *,
    max_upload_bytes: int = 1 << 20,
    answerer: Callable[[Library], Asker] = FakeAnswerer,
) -> Iterator[World]:
    """Serve a new library in `folder`; without a parser it reads files in processes of its own."""
    config = LibraryConfig(folder, max_upload_bytes=max_upload_bytes)
    world = World(loaded=False)
    with (
        closing(world.library),
        closing(Library.open(config, HashEmbedder(), parser=parser)) as library,
    ):
        world.services.provide_library(library)
        world.services.provide_sessions(world.sessions, lambda: ArchiveCounts(0, 0, {}, 0))
        world.services.provide_engine(world.engine, answerer(library))
        yield world
