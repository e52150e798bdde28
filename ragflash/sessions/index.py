"""What the headers of all session files say, in SQLite: a cache that may be lost at any time.

Whatever goes wrong with it is logged and otherwise ignored; a scan of the files brings it back.
"""

import json
import logging
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sqlite_utils import Database

from ragflash.kvcache.identity import Value
from ragflash.sessions.disk import Disk
from ragflash.sessions.migrations import MIGRATIONS
from ragflash.sessions.records import PrefixKeys

EVICTED_KEYS_REMEMBERED = 4096
_BUSY_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One file as the index knows it; it is believed while the file's size and inode are these."""

    keys: PrefixKeys
    namespace: str
    source_ids: tuple[str, ...]
    identity: dict[str, Value]
    num_tokens: int
    end: int
    size_bytes: int
    inode: int
    prefill_seconds: float
    created_s: float


class SessionIndex:
    """One connection; the caller sees to it that one thread at a time uses it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path, disk: Disk, *, writable: bool) -> Self:
        """Open the index, or an empty one in memory where there is none to read.

        A writer replaces a file that is no index.
        """
        try:
            return cls(_connect_writer(path) if writable else _connect_reader(path))
        except sqlite3.Error as error:
            _log.warning("the index of sessions is not used", extra={"reason": str(error)})
        if writable:
            for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
                disk.remove(path.with_name(name))
            with _forgiving():
                return cls(_connect_writer(path))
        return cls(_prepared(sqlite3.connect(":memory:", check_same_thread=False)))

    def close(self) -> None:
        """Close the connection; the write-ahead log is folded in."""
        self._connection.close()

    def rows(self) -> list[SegmentRow]:
        """Return all rows that can be read."""
        found: list[SegmentRow] = []
        with _forgiving():
            rows = self._connection.execute("SELECT * FROM segments")
            found.extend(_decode(row) for row in rows)
        return found

    def put(self, row: SegmentRow) -> None:
        """Add or replace a row."""
        with _forgiving():
            marks = ", ".join("?" * 12)
            statement = f"INSERT OR REPLACE INTO segments VALUES ({marks})"
            self._connection.execute(statement, _encode(row))
            self._connection.execute("DELETE FROM evicted WHERE key = ?", (row.keys.key,))

    def remove(self, keys: Collection[bytes]) -> None:
        """Remove rows; what they said is overwritten."""
        if not keys:
            return
        with _forgiving():
            statement = "DELETE FROM segments WHERE key = ?"
            self._connection.executemany(statement, [(key,) for key in keys])
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def evicted(self) -> list[bytes]:
        """Return keys that were evicted, the oldest first."""
        found: list[bytes] = []
        with _forgiving():
            rows = self._connection.execute("SELECT key FROM evicted ORDER BY seq")
            found.extend(key for (key,) in rows)
        return found

    def add_evicted(self, keys: Iterable[bytes]) -> None:
        """Remember that keys were evicted."""
        with _forgiving():
            statement = "INSERT OR REPLACE INTO evicted (key) VALUES (?)"
            self._connection.executemany(statement, [(key,) for key in keys])
            self._connection.execute(
                "DELETE FROM evicted WHERE seq <= (SELECT max(seq) FROM evicted) - ?",
                (EVICTED_KEYS_REMEMBERED,),
            )

    def written(self, day: int) -> int | None:
        """Return how many bytes were written on a day; `None` where nothing is known of it."""
        found: list[int] = []
        with _forgiving():
            rows = self._connection.execute("SELECT bytes FROM written WHERE day = ?", (day,))
            found.extend(count for (count,) in rows)
        return found[0] if found else None

    def set_written(self, day: int, num_bytes: int) -> None:
        """Say how many bytes were written on a day; former days are forgotten."""
        with _forgiving():
            statement = "INSERT OR REPLACE INTO written VALUES (?, ?)"
            self._connection.execute(statement, (day, num_bytes))
            self._connection.execute("DELETE FROM written WHERE day < ?", (day,))


@contextmanager
def _forgiving() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        _log.warning("the index of sessions failed", extra={"reason": str(error)})


def _connect_writer(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        path.chmod(0o600)
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
        return _prepared(connection)
    except sqlite3.Error:
        connection.close()
        raise


def _connect_reader(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
    try:
        connection.execute("SELECT count(*) FROM segments")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    MIGRATIONS.apply(Database(connection, execute_plugins=False))
    return connection


def _encode(row: SegmentRow) -> tuple[object, ...]:
    return (
        row.keys.key,
        row.keys.parent,
        row.keys.lineage,
        row.namespace,
        json.dumps(row.source_ids),
        json.dumps(row.identity),
        row.num_tokens,
        row.end,
        row.size_bytes,
        row.inode,
        row.prefill_seconds,
        row.created_s,
    )


def _decode(row: tuple[Any, ...]) -> SegmentRow:
    key, parent, lineage, namespace, source_ids, identity, *numbers = row
    return SegmentRow(
        PrefixKeys(key, parent, lineage),
        namespace,
        tuple(json.loads(source_ids)),
        json.loads(identity),
        *numbers,
    )
