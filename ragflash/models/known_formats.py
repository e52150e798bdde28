"""In what format keys and values of a model file may be stored, as it was measured.

A table of measured files comes along; `ragflash model check` adds to one of this machine.
"""

import json
from importlib import resources
from pathlib import Path
from typing import cast

from ragflash.errors import StorageError
from ragflash.gguf.disk_cache import read_checked, write_checked
from ragflash.kvcache.formats import KV_FORMATS, KVFormatName

_SHIPPED = resources.files("ragflash.models") / "known_formats.json"
_MEASURED_HERE = "kv_formats.json"


def known_format(model_hash: str, folder: Path | None) -> KVFormatName | None:
    """Return the smallest format that was good enough, if the file was ever measured.

    Args:
        model_hash: SHA-256 of the file.
        folder: Where this machine's own table is.
    """
    own = _read(folder) if folder is not None else {}
    shipped = json.loads(_SHIPPED.read_text(encoding="utf-8"))
    entry = own.get(model_hash) or shipped.get(model_hash)
    return None if entry is None else cast(KVFormatName, entry["kv_format"])


def remember_format(model_hash: str, model: str, kv_format: KVFormatName, folder: Path) -> None:
    """Put a file into this machine's table; raises `StorageError` when the disk refuses."""
    table = _read(folder) | {model_hash: {"model": model, "kv_format": kv_format}}
    write_checked(folder / _MEASURED_HERE, json.dumps(table).encode())


def _read(folder: Path) -> dict[str, dict[str, str]]:
    """Return this machine's table without what is not understood; empty where there is none."""
    try:
        stored = read_checked(folder / _MEASURED_HERE)
    except StorageError:
        return {}
    table = json.loads(stored) if stored is not None else {}
    return {key: entry for key, entry in table.items() if entry.get("kv_format") in KV_FORMATS}
