"""Has the model read documents before anybody asks about them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ragflash.cli.output import Tracker
from ragflash.cli.parts import SCOPE, library_and_engine
from ragflash.errors import EngineError, SettingInvalid
from ragflash.rag.records import DocumentRecord, JobRecord, JobState
from ragflash.settings import Settings

if TYPE_CHECKING:
    from ragflash.rag.library import Library


@contextmanager
def reading_library(settings: Settings) -> "Iterator[Library]":
    """Open the library with a model that reads; at the end all that was read is in its files.

    Raises:
        SettingInvalid: There are no files to keep it in.
    """
    if not settings.sessions_gb:
        raise SettingInvalid(
            "what the model reads would be forgotten at once: RAGFLASH_SESSIONS_GB is 0"
        )
    from ragflash.rag.prefill import EngineReader  # noqa: PLC0415  (loads the store)

    with library_and_engine(settings) as (library, engine):
        assert engine is not None
        library.prefills.start(EngineReader(library, engine))
        try:
            yield library
        finally:
            library.prefills.close()


def read_ahead(library: "Library", record: DocumentRecord, track: Tracker) -> JobRecord:
    """Have a document read, and wait for it.

    Raises:
        NotFound: It cannot be asked.
        ContextTooLong: It does not fit the model.
        EngineError: It was not read.
    """
    job = queued = library.prefill(SCOPE, record.id)
    for job in library.watch(SCOPE, queued.id):
        track(f"{record.name}: {job.stage or job.state}", job.done, job.total)
    if job.state is not JobState.DONE:
        raise EngineError(f"{record.name} was not read: {job.detail or job.state}")
    return job
