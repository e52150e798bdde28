"""What the routes need from the rest of the program, and how they get it."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

from fastapi import Depends, Request

from ragflash.api.problems import NotReady
from ragflash.engine.request import EngineInfo, Event, GenerateRequest
from ragflash.engine.stats import EngineStats
from ragflash.errors import Conflict, EngineDead, RagflashError, StorageError
from ragflash.metrics import Numbers
from ragflash.rag.records import (
    DEFAULT_COLLECTION,
    AskEvent,
    AskRequest,
    DocumentRecord,
    DuplicatePolicy,
    JobRecord,
    Scope,
    SearchHit,
    SearchMode,
)
from ragflash.sessions import ArchiveCounts, SessionCounts, SessionInfo

__all__ = ["ApiConfig", "CallerScope", "Provided", "Services"]


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The part of the settings that concerns HTTP.

    Attributes:
        allowed_hosts: Names that may stand in the Host header, lower case; `None` allows any.
    """

    api_key: str | None
    allowed_hosts: frozenset[str] | None
    heartbeat_s: float
    max_upload_bytes: int


class TextPage(Protocol):
    """A page's range of a document's text."""

    @property
    def number(self) -> int: ...
    @property
    def label(self) -> str | None: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class PagedText(Protocol):
    """A document's stored text; what the routes see of `ragflash_ingest`'s `Document`."""

    @property
    def text(self) -> str: ...
    @property
    def pages(self) -> Sequence[TextPage]: ...


class Added(Protocol):
    """What adding a document gave; `job` is that of the first upload when `deduplicated`.

    `prefill` is the job that has it read, where that was asked for.
    """

    @property
    def document(self) -> DocumentRecord: ...
    @property
    def job(self) -> JobRecord: ...
    @property
    def deduplicated(self) -> bool: ...
    @property
    def prefill(self) -> JobRecord | None: ...


class DocumentPage(Protocol):
    """A part of a listing."""

    @property
    def items(self) -> Sequence[DocumentRecord]: ...
    @property
    def has_more(self) -> bool: ...


class LibraryState(Protocol):
    """How many documents and jobs there are in each state."""

    @property
    def documents(self) -> Mapping[str, int]: ...
    @property
    def jobs(self) -> Mapping[str, int]: ...


class DocumentLibrary(Protocol):
    """The stored documents; every call blocks and may come from any thread."""

    def add(
        self,
        scope: Scope,
        collection_id: str,
        name: str,
        source: BinaryIO | bytes,
        on_duplicate: DuplicatePolicy = ...,
        *,
        prefill: bool = ...,
    ) -> Added: ...
    def prefill(self, scope: Scope, document_id: str) -> JobRecord: ...
    def get(self, scope: Scope, document_id: str) -> DocumentRecord: ...
    def delete(self, scope: Scope, document_id: str) -> None: ...
    def document(self, scope: Scope, document_id: str) -> PagedText: ...
    def content_path(self, scope: Scope, document_id: str) -> Path: ...
    def job(self, scope: Scope, job_id: str) -> JobRecord: ...
    def cancel(self, scope: Scope, job_id: str) -> JobRecord: ...
    def search(
        self,
        scope: Scope,
        query: str,
        *,
        document_ids: Sequence[str] | None = ...,
        limit: int = ...,
        mode: SearchMode = ...,
    ) -> Sequence[SearchHit]: ...
    def health(self) -> LibraryState: ...
    def list(self, scope: Scope, *, limit: int, after: str | None) -> DocumentPage: ...


class Asker(Protocol):
    """Answers questions; closing the iterator cancels the work."""

    def ask(self, scope: Scope, request: AskRequest) -> AsyncGenerator[AskEvent, None]: ...


class Converser(Protocol):
    """Puts conversations behind documents; blocks."""

    def place(
        self,
        scope: Scope,
        document_id: str,
        request: GenerateRequest,
        tools: Sequence[object] = ...,
    ) -> GenerateRequest: ...


class TextEngine(Protocol):
    """The model; closing the iterator cancels the request."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]: ...
    def info(self) -> EngineInfo: ...
    def stats(self) -> EngineStats: ...
    def stored_bytes(self) -> Mapping[str, int]: ...
    @property
    def is_alive(self) -> bool: ...


class SessionStore(Protocol):
    """The files of remembered prompts; every call blocks and may come from any thread."""

    def list(self) -> Sequence[SessionInfo]: ...
    def pin(self, session_id: str) -> None: ...
    def unpin(self, session_id: str) -> None: ...
    def delete(self, session_id: str) -> int: ...
    def counts(self) -> SessionCounts: ...


class ModelSwitch(Protocol):
    """Exchanges the model; every call blocks and may come from any thread."""

    def names(self) -> Sequence[str]: ...
    def use(self, name: str) -> None: ...


class Services:
    """The parts that routes work with; they arrive one by one while the server already answers.

    A part that has not arrived raises `NotReady`, or `failure`, which keeps it from arriving.
    """

    def __init__(self, config: ApiConfig) -> None:
        self.config = config
        self._library: DocumentLibrary | None = None
        self._answerer: Asker | None = None
        self._conversations: Converser | None = None
        self._engine: TextEngine | None = None
        self._models: ModelSwitch | None = None
        self._sessions: SessionStore | None = None
        self._count_saves: Callable[[], ArchiveCounts] | None = None
        self.failure: RagflashError | None = None

    def provide_library(self, library: DocumentLibrary) -> None:
        """Make documents and search available."""
        self._library = library

    def provide_conversations(self, conversations: Converser) -> None:
        """Make conversations about documents available, before the engine that continues them."""
        self._conversations = conversations

    def provide_engine(self, engine: TextEngine, answerer: Asker) -> None:
        """Make chat and answers available."""
        self._engine, self._answerer = engine, answerer

    def withdraw_engine(self) -> None:
        """Refuse chat, answers and conversations until another engine is provided."""
        self._engine = self._answerer = self._conversations = None

    def provide_models(self, models: ModelSwitch) -> None:
        """Make it possible to exchange the model."""
        self._models = models

    def provide_sessions(self, store: SessionStore, counts: Callable[[], ArchiveCounts]) -> None:
        """Make files of remembered prompts available, before the engine that uses them."""
        self._sessions, self._count_saves = store, counts

    def fail(self, error: RagflashError) -> None:
        """Say why what is missing will not come."""
        self.failure = error

    @property
    def library(self) -> DocumentLibrary:
        """The stored documents."""
        if self._library is None:
            raise self._absence("the document store is being opened")
        return self._library

    @property
    def answerer(self) -> Asker:
        """Answers from documents."""
        if self._answerer is None:
            raise self._absence("the model is being loaded")
        return self._answerer

    @property
    def conversations(self) -> Converser:
        """Conversations about documents."""
        if self._conversations is None:
            raise self._absence("the model is being loaded")
        return self._conversations

    @property
    def engine(self) -> TextEngine:
        """The running model.

        Raises:
            EngineDead: It was running and has stopped.
        """
        if self._engine is None:
            raise self._absence("the model is being loaded")
        if not self._engine.is_alive:
            raise EngineDead("the engine's worker has stopped; restart the server")
        return self._engine

    @property
    def models(self) -> ModelSwitch:
        """What exchanges the model."""
        if self._models is None:
            raise self._absence("the model is being loaded")
        return self._models

    @property
    def keeps_sessions(self) -> bool:
        """Whether prompts are remembered in files; raises `NotReady` until that is known."""
        if self._engine is None:
            raise self._absence("the model is being loaded")
        return self._sessions is not None

    @property
    def sessions(self) -> SessionStore:
        """The files of remembered prompts.

        Raises:
            Conflict: None are kept.
        """
        if not self.keeps_sessions:
            raise Conflict(
                "this server keeps no sessions: RAGFLASH_SESSIONS_GB is 0, or their folder could "
                "not be used, as its log says"
            )
        assert self._sessions is not None
        return self._sessions

    def session_counts(self) -> Numbers | None:
        """Count files of remembered prompts; `None` where there are none to count."""
        if self._sessions is None or self._count_saves is None:
            return None
        try:
            return asdict(self._sessions.counts()) | asdict(self._count_saves())
        except StorageError:
            return None

    def stored_bytes(self) -> Mapping[str, int]:
        """Say what stored prompts take of memory, by id; nothing once the engine has stopped."""
        try:
            return self.engine.stored_bytes()
        except EngineDead:
            return {}

    def missing(self) -> tuple[tuple[str, ...], str | None]:
        """Name the parts that cannot serve, and say why."""
        missing: list[str] = []
        detail: str | None = None
        for part in ("library", "engine"):
            try:
                getattr(self, part)
            except RagflashError as error:
                missing.append(part)
                detail = detail or error.detail
        return tuple(missing), detail

    def engine_info(self) -> EngineInfo | None:
        """Describe the model; `None` while it is not loaded."""
        return None if self._engine is None else self._engine.info()

    def engine_stats(self) -> EngineStats | None:
        """Say what the model has done and is doing; `None` while it is not loaded."""
        return None if self._engine is None else self._engine.stats()

    def _absence(self, what: str) -> RagflashError:
        return self.failure or NotReady(f"{what}; try again in a few seconds")


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _scope() -> Scope:
    # One key, one collection: whoever passed the guard sees the default collection.
    return Scope(frozenset({DEFAULT_COLLECTION}))


Provided = Annotated[Services, Depends(_services)]
CallerScope = Annotated[Scope, Depends(_scope)]
