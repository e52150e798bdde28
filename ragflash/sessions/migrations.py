"""Every change of the schema of the index: named, in order, never edited once released."""

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

MIGRATIONS = Migrations("sessions")


@MIGRATIONS(name="0001_segments")
def segments(db: Database) -> None:
    """What headers say, what was evicted, and how much was written each day."""
    for statement in (
        """CREATE TABLE segments (
            key BLOB PRIMARY KEY,
            parent BLOB NOT NULL,
            lineage BLOB NOT NULL,
            namespace TEXT NOT NULL,
            source_ids TEXT NOT NULL,
            identity TEXT NOT NULL,
            num_tokens INTEGER NOT NULL,
            end_tokens INTEGER NOT NULL,
            size_bytes INTEGER NOT NULL,
            inode INTEGER NOT NULL,
            prefill_seconds REAL NOT NULL,
            created_s REAL NOT NULL
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE evicted (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            key BLOB NOT NULL UNIQUE
        ) STRICT""",
        """CREATE TABLE written (
            day INTEGER PRIMARY KEY,
            bytes INTEGER NOT NULL
        ) STRICT""",
    ):
        db.execute(statement)
