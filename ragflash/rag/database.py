"""The library's SQLite file behind one lock: a connection, transactions, and a bell for changes."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from sqlite_utils import Database as MigratedDatabase

from ragflash.errors import StorageError
from ragflash.rag.migrations import MIGRATIONS

_BUSY_TIMEOUT_S = 10.0

SqlValue = str | int | float | None


class Database:
    """One connection for all threads; every statement holds the lock.

    Attributes:
        changed: Condition on the lock; whoever changes what others wait for notifies it.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the file and bring its schema up to date.

        Freed pages are overwritten with zeros, so that deleted text is gone.

        Raises:
            StorageError: The file cannot be opened, written or migrated.
        """
        with _storage_errors(f"{path} cannot be used"):
            connection = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                connection.row_factory = sqlite3.Row
                connection.create_function("casefold", 1, str.casefold, deterministic=True)
                for pragma in (
                    "journal_mode = WAL",
                    "synchronous = FULL",
                    "foreign_keys = ON",
                    "secure_delete = ON",
                ):
                    connection.execute(f"PRAGMA {pragma}")
                MIGRATIONS.apply(MigratedDatabase(connection, execute_plugins=False))
            except sqlite3.Error:
                connection.close()
                raise
        return cls(connection)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make the statements inside happen together or not at all; the lock is held meanwhile.

        Raises:
            StorageError: The disk or the database refused.
        """
        with self._lock, _storage_errors("the library's database cannot be written"):
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def execute(self, statement: str, *values: SqlValue) -> int:
        """Run one statement and return how many rows it changed."""
        with self._lock, _storage_errors("the library's database cannot be written"):
            return self._connection.execute(statement, values).rowcount

    def insert_many(self, statement: str, rows: Sequence[Sequence[SqlValue]]) -> None:
        """Run one statement for every row."""
        with self._lock, _storage_errors("the library's database cannot be written"):
            self._connection.executemany(statement, rows)

    def rows(self, statement: str, *values: SqlValue) -> list[sqlite3.Row]:
        """All rows of a query."""
        with self._lock, _storage_errors("the library's database cannot be read"):
            return self._connection.execute(statement, values).fetchall()

    def row(self, statement: str, *values: SqlValue) -> sqlite3.Row | None:
        """The first row of a query."""
        found = self.rows(statement, *values)
        return found[0] if found else None

    def shred(self) -> None:
        """Empty the write-ahead log, which still holds the text of rows that are gone."""
        self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; the write-ahead log is folded in."""
        with self._lock:
            self._connection.close()


def placeholders(count: int) -> str:
    """As many question marks, for `IN (…)`."""
    return ", ".join("?" * count)


@contextmanager
def _storage_errors(what: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StorageError(f"{what}: {error}") from error
