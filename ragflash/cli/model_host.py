"""The model that a server runs, and how another takes its place without a restart."""

import gc
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragflash.api.deps import Services
from ragflash.cli.parts import EngineSlot, model_path, start_model
from ragflash.errors import Conflict, NotFound, RagflashError
from ragflash.settings import Settings

if TYPE_CHECKING:
    from ragflash.kvcache.archive import SegmentArchive
    from ragflash.rag.library import Library

_log = logging.getLogger(__name__)

_GRACE_S = 30.0
"""How long requests under way are waited for before they are ended."""

_LOOK_EVERY_S = 0.05


class ModelHost:
    """Starts models one after the other over the same documents and the same stored prompts.

    Stored prompts of a model wait in their files until it comes back.

    Args:
        settings: All of them; `model` is what is started first.
        services: Told of the engine that there is, and that there is none meanwhile.
        library: Of documents.
        slot: Where the library finds the engine.
        archive: Of stored prompts.
    """

    def __init__(
        self,
        settings: Settings,
        services: Services,
        library: "Library",
        slot: EngineSlot,
        archive: "SegmentArchive | None",
    ) -> None:
        self._settings = settings
        self._services = services
        self._library = library
        self._slot = slot
        self._archive = archive
        self._path = model_path(settings)
        self._changing = threading.Lock()

    def names(self) -> Sequence[str]:
        """Return what `use` takes: the first model's file, and those that were pulled."""
        return [*self._paths()]

    def start(self) -> None:
        """Load the first model; blocks for as long as that takes.

        Raises:
            ModelError: It cannot be used.
            DeviceError: The card cannot be used as it was asked to be.
        """
        with self._changing:
            self._load(self._path)

    def use(self, name: str) -> None:
        """Load another model in place of the one that runs; blocks for as long as that takes.

        Requests under way are given half a minute to end, new ones are refused until it is there.
        If it cannot be loaded, the one before is loaded again.

        Raises:
            NotFound: There is no model of this name.
            Conflict: One is being loaded already, or it cannot be used.
            ModelError: Nor can the one before any more.
            DeviceError: Likewise.
        """
        path = self._paths().get(name)
        if path is None:
            raise NotFound(f"there is no model {name!r}; GET /v1/engine names those that there are")
        if not self._changing.acquire(blocking=False):
            raise Conflict("a model is being loaded; try again when it is there")
        try:
            self._withdraw()
            try:
                self._load(path)
            except RagflashError as error:
                _log.warning("a model cannot be used", extra={"detail": error.detail})
                self._load_again()
                raise Conflict(
                    f"{name} cannot be used, and the model before runs again: {error.detail}"
                ) from error
        finally:
            self._changing.release()

    def close(self) -> None:
        """End the engine that there is."""
        with self._changing:
            if self._slot.client is not None:
                self._slot.client.close()

    def _paths(self) -> dict[str, Path]:
        from ragflash.cli.models import installed  # noqa: PLC0415  (imports torch)

        folder = self._settings.data_dir / "models"
        first = model_path(self._settings)
        found = {first.name: first}
        for path in installed(folder):
            name = str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name
            found.setdefault(name, path)
        return found

    def _withdraw(self) -> None:
        """Let requests under way end, then the engine; nothing of it is held afterwards."""
        client = self._slot.client
        self._services.withdraw_engine()
        if client is None:
            return
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            stats = client.stats()
            if not (client.is_alive and stats.queued + stats.running):
                break
            time.sleep(_LOOK_EVERY_S)
        self._slot.client = None
        client.close()
        del client
        gc.collect()  # its memory, and a card's, is wanted by the next one

    def _load_again(self) -> None:
        """Load the model before; if it cannot be used any more, the server says so from now on."""
        try:
            self._load(self._path)
        except RagflashError as error:
            self._services.fail(error)
            raise

    def _load(self, path: Path) -> None:
        from ragflash.rag.answer import Answerer  # noqa: PLC0415  (loads the store)
        from ragflash.rag.conversation import Conversations  # noqa: PLC0415  (as above)
        from ragflash.rag.prefill import EngineReader  # noqa: PLC0415  (as above)

        engine = start_model(self._settings.model_copy(update={"model": path}), self._archive)
        self._path, self._slot.client = path, engine
        self._library.prefills.start(EngineReader(self._library, engine))
        self._services.provide_conversations(Conversations(self._library, engine))
        self._services.provide_engine(engine, Answerer(self._library, engine))
