"""What a library says of an upload, of a part of its documents, and of how it is doing."""

from dataclasses import dataclass

from ragflash.rag.records import DocumentRecord, JobRecord


@dataclass(frozen=True, slots=True)
class AddResult:
    """What became of an upload.

    Attributes:
        job: The work on the document; that of the earlier upload when `deduplicated`.
        deduplicated: The collection held these bytes already and nothing is done again.
        prefill: The job that has it read, where that was wanted.
    """

    document: DocumentRecord
    job: JobRecord
    deduplicated: bool
    prefill: JobRecord | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing."""

    items: tuple[DocumentRecord, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class LibraryHealth:
    """How a library is doing.

    Attributes:
        documents: Number by state.
        jobs: Likewise.
        open_jobs: Jobs that wait or run.
        worker_alive: Whether jobs are being worked on.
        free_bytes: Of the disk that the data folder is on.
    """

    documents: dict[str, int]
    jobs: dict[str, int]
    chunks: int
    open_jobs: int
    worker_alive: bool
    embedding: str
    free_bytes: int
