"""How drafts of each document have done, kept from one run of an engine to the next; no torch."""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ragflash.errors import StorageError
from ragflash.gguf.disk_cache import read_checked, write_checked
from ragflash.speculative.survival import Survival

MOST_DOCUMENTS = 256

_VERSION = 1
_log = logging.getLogger(__name__)


class Learned:
    """Rates of drafts by the documents that are asked about, those asked about last.

    Of a document the file has a hash of its id, and no text.

    Args:
        priors: See `Survival`.
        path: File that they are kept in; `None` keeps them in memory.
    """

    def __init__(self, priors: Mapping[str, tuple[float, ...]], path: Path | None = None) -> None:
        self._priors = priors
        self._path = path
        self._known: OrderedDict[str, Survival] = OrderedDict()
        for key, state in _read(path).items():
            self._known[key] = Survival(priors)
            self._known[key].load_state(state)

    def of(self, namespace: str, source_ids: Sequence[str]) -> Survival:
        """Return what is shared by all questions about documents; for the worker's thread."""
        spelled = json.dumps([namespace, *source_ids]).encode()
        key = hashlib.sha256(spelled).hexdigest()[:32]
        survival = self._known.setdefault(key, Survival(self._priors))
        self._known.move_to_end(key)
        if len(self._known) > MOST_DOCUMENTS:
            self._known.popitem(last=False)
        return survival

    def save(self) -> None:
        """Write the file, when nobody learns any more; a disk that refuses costs what it held."""
        if self._path is None:
            return
        states = {key: survival.export_state() for key, survival in self._known.items()}
        seen = {key: state for key, state in states.items() if state}
        stored = json.dumps({"version": _VERSION, "documents": seen}).encode()
        try:
            write_checked(self._path, stored)
        except StorageError as error:
            _log.warning("what drafts have done is not kept", extra={"reason": error.detail})


def learned_path(folder: Path | None, model_hash: str, drafters: Mapping[str, str]) -> Path | None:
    """Return the file of a model with some drafters in a folder; `None` without one.

    Args:
        folder: Where.
        model_hash: SHA-256 of the model's file.
        drafters: Hashes of what they depend on, by name.
    """
    if folder is None:
        return None
    spelled = json.dumps([model_hash, sorted(drafters.items())]).encode()
    return folder / f"drafts-{hashlib.sha256(spelled).hexdigest()[:16]}.json"


def _read(path: Path | None) -> dict[str, dict[str, list[list[float]]]]:
    """Return the documents of a file; none where it is missing, damaged, or of another version."""
    try:
        stored = None if path is None else read_checked(path)
    except StorageError as error:
        _log.warning("what drafts have done begins anew", extra={"reason": error.detail})
        return {}
    told = {} if stored is None else json.loads(stored)
    documents: dict[str, dict[str, list[list[float]]]] = told.get("documents", {})
    return documents if told.get("version") == _VERSION else {}
