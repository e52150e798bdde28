"""Every change that the library's schema has had: named, in order, never edited once released."""

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

MIGRATIONS = Migrations("library")


def _run(db: Database, *statements: str) -> None:
    for statement in statements:
        db.execute(statement)


@MIGRATIONS(name="0001_collections_documents")
def collections_documents(db: Database) -> None:
    """Collections with the fingerprint of their vectors, documents, and their further names."""
    _run(
        db,
        """CREATE TABLE collections (
            id TEXT PRIMARY KEY,
            fingerprint TEXT NOT NULL,
            created_ms INTEGER NOT NULL
        ) STRICT""",
        """CREATE TABLE documents (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            collection_id TEXT NOT NULL REFERENCES collections (id),
            name TEXT NOT NULL,
            state TEXT NOT NULL,
            media_type TEXT NOT NULL,
            size_bytes INTEGER NOT NULL,
            sha256 TEXT NOT NULL,
            parser TEXT NOT NULL,
            pages INTEGER NOT NULL,
            chunks INTEGER NOT NULL,
            characters INTEGER NOT NULL,
            tokens INTEGER NOT NULL,
            created_ms INTEGER NOT NULL,
            reason TEXT,
            warnings TEXT NOT NULL,
            replaces TEXT
        ) STRICT""",
        "CREATE INDEX documents_by_collection ON documents (collection_id, seq)",
        "CREATE INDEX documents_by_content ON documents (sha256, collection_id)",
        """CREATE TABLE aliases (
            document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
            collection_id TEXT NOT NULL,
            name TEXT NOT NULL,
            PRIMARY KEY (document_id, name)
        ) STRICT, WITHOUT ROWID""",
    )


@MIGRATIONS(name="0002_chunks_terms")
def chunks_terms(db: Database) -> None:
    """Passages, and in how many passages of a document each term occurs."""
    _run(
        db,
        """CREATE TABLE chunks (
            document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            collection_id TEXT NOT NULL,
            start INTEGER NOT NULL,
            "end" INTEGER NOT NULL,
            page_start INTEGER NOT NULL,
            page_end INTEGER NOT NULL,
            section TEXT,
            text TEXT NOT NULL,
            PRIMARY KEY (document_id, position)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE terms (
            collection_id TEXT NOT NULL,
            term INTEGER NOT NULL,
            document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
            chunks INTEGER NOT NULL,
            PRIMARY KEY (collection_id, term, document_id)
        ) STRICT, WITHOUT ROWID""",
        "CREATE INDEX terms_by_document ON terms (document_id)",
    )


@MIGRATIONS(name="0003_jobs")
def jobs(db: Database) -> None:
    """Background work; rows go with their document."""
    _run(
        db,
        """CREATE TABLE jobs (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            collection_id TEXT NOT NULL,
            document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
            state TEXT NOT NULL,
            stage TEXT NOT NULL,
            done INTEGER NOT NULL,
            total INTEGER NOT NULL,
            created_ms INTEGER NOT NULL,
            code TEXT,
            detail TEXT
        ) STRICT""",
        "CREATE INDEX jobs_by_state ON jobs (state, seq)",
        "CREATE INDEX jobs_by_document ON jobs (document_id)",
    )


@MIGRATIONS(name="0004_job_leases")
def job_leases(db: Database) -> None:
    """Who works on a job and until when, how often a process died at it, and what was reached.

    `mark` grows with what is stored for good; a step forward gives new attempts.
    """
    _run(
        db,
        "ALTER TABLE jobs ADD COLUMN owner TEXT",
        "ALTER TABLE jobs ADD COLUMN lease_until_ms INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE jobs ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE jobs ADD COLUMN mark INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE jobs ADD COLUMN cancelling INTEGER NOT NULL DEFAULT 0",
    )


@MIGRATIONS(name="0005_job_retries")
def job_retries(db: Database) -> None:
    """How often something else was to blame, and when the job is tried again."""
    _run(
        db,
        "ALTER TABLE jobs ADD COLUMN faults INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE jobs ADD COLUMN retry_at_ms INTEGER",
    )


@MIGRATIONS(name="0006_job_kinds")
def job_kinds(db: Database) -> None:
    """What a job does; reading a document for the model is one besides taking it in."""
    _run(db, "ALTER TABLE jobs ADD COLUMN kind TEXT NOT NULL DEFAULT 'ingest'")
