"""Bodies of the routes that take documents in, show them, and follow the work on them."""

from typing import Literal

from pydantic import Field

from ragflash.api.schemas import Body, Reply, Text
from ragflash.rag.records import DocumentState, JobKind, JobState


class TextBody(Body):
    """A document sent as text; `name` is a label and may end in `.md` or `.html`."""

    text: Text
    name: Text = "untitled.txt"
    prefill: bool = Field(
        False, strict=True, description="Whether the model reads it too, beforehand."
    )


class DocumentOut(Reply):
    """A document; states in which it can be asked are `ready`, `partial` and `prefilling`."""

    object: Literal["document"] = "document"
    id: str
    name: str
    collection: str = Field(validation_alias="collection_id")
    state: DocumentState
    reason: str | None
    media_type: str
    size_bytes: int
    sha256: str
    pages: int
    chunks: int
    characters: int
    tokens: int
    warnings: tuple[str, ...]
    created_ms: int


class JobOut(Reply):
    """Background work; `done` of `total` counts the pages, chunks or tokens of its stage.

    A job that a fault of the disk or of a service has stopped is `queued` again, says in `code` and
    `detail` what it was, and goes on at `retry_at_ms` (ms since 1970).
    """

    object: Literal["job"] = "job"
    id: str
    kind: JobKind
    document: str = Field(validation_alias="document_id")
    state: JobState
    stage: str
    done: int
    total: int
    code: str | None
    detail: str | None
    retry_at_ms: int | None
    created_ms: int


class UploadOut(Reply):
    """What became of an upload; the job is that of the first one when `deduplicated`.

    `prefill` is the job that has the model read it, where that was asked for.
    """

    document: DocumentOut
    job: JobOut
    deduplicated: bool
    prefill: JobOut | None


class DocumentListOut(Reply):
    """A page of documents; the next one is asked for with `after=last_id`."""

    object: Literal["list"] = "list"
    data: tuple[DocumentOut, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None


class PageTextOut(Reply):
    """Text of one page, or of all; offsets count characters of the whole text."""

    document: str
    page: int | None
    label: str | None
    start: int
    end: int
    text: str
