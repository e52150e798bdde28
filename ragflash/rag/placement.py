"""Where a library's vectors are: in its folder, or on a Qdrant server.

The file `vectors.json` in the data folder says so, and gives the library the name under which a
server knows it. The catalogue alone cannot tell a store that holds nothing from the wrong store.
"""

import json
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Self
from uuid import uuid4

from ragflash.errors import SettingInvalid, StorageError
from ragflash.rag.disk import Disk
from ragflash.rag.files import storage_errors

_FILE = "vectors.json"
_HEADER_VALUE = re.compile(r"[\x21-\x7e]+")


class StoreKind(StrEnum):
    """Which driver holds the vectors."""

    EMBEDDED = "embedded"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A Qdrant server.

    Attributes:
        url: `http://` or `https://`, host and port.
        timeout_s: Longest wait for one answer; whole seconds.

    Raises:
        SettingInvalid: The key cannot be sent; the text does not show it, as a client's would.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: int = 30

    def __post_init__(self) -> None:
        if self.api_key is not None and not _HEADER_VALUE.fullmatch(self.api_key):
            raise SettingInvalid(
                "RAGFLASH_QDRANT_API_KEY holds characters that an HTTP header cannot carry, as "
                "a line's end or a space: set it to the key alone"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """What a data folder says about its vectors.

    Attributes:
        library: Random and lasting, so that libraries can share a server.
    """

    library: str
    kind: StoreKind

    @classmethod
    def load(cls, data_dir: Path) -> Self:
        """Read the data folder's file; a folder without one gets one, for the embedded store.

        Raises:
            StorageError: The file is damaged, or cannot be read or written.
        """
        path = data_dir / _FILE
        with storage_errors(f"{path} cannot be used"):
            if not path.exists():
                placement = cls(uuid4().hex[:12], StoreKind.EMBEDDED)
                placement.save(data_dir)
                return placement
            text = path.read_text(encoding="utf-8")
        try:
            values = json.loads(text)
            return cls(str(values["library"]), StoreKind(values["kind"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path} is damaged: restore it from a backup") from error

    def moved(self, data_dir: Path, kind: StoreKind) -> Self:
        """Note that the vectors are elsewhere now; durable when this returns."""
        placement = replace(self, kind=kind)
        placement.save(data_dir)
        return placement

    def save(self, data_dir: Path) -> None:
        """Write the file aside and rename it into place; durable when this returns."""
        disk, aside = Disk(), data_dir / f"{_FILE}.new"
        text = json.dumps({"library": self.library, "kind": self.kind})
        with storage_errors(f"{data_dir / _FILE} cannot be written"):
            disk.remove(aside)
            disk.write(aside, [text.encode()])
            disk.move(aside, data_dir / _FILE)

    def folder(self, data_dir: Path, fingerprint: str) -> Path:
        """Folder of the embedded store of an embedding model."""
        return data_dir / "index" / digest(fingerprint)

    def collection(self, fingerprint: str) -> str:
        """Name of the server's collection: this library under this embedding model."""
        return f"ragflash_{self.library}_{digest(fingerprint)}"


def digest(fingerprint: str) -> str:
    """Name an embedding model where only a name of a few letters fits."""
    return sha256(fingerprint.encode()).hexdigest()[:16]
