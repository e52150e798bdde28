"""The catalogue: which documents there are, in what state, and their passages.

Reads for callers take a `Scope` and answer `NotFound` for what is outside it, absent or being
deleted, with the same words.
"""

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ragflash.errors import NotFound
from ragflash.rag.database import Database, SqlValue, placeholders
from ragflash.rag.records import (
    ChunkRecord,
    DocumentRecord,
    DocumentState,
    JobKind,
    JobState,
    Scope,
)
from ragflash_ingest.document import Chunk

# States only move forward: along this table.
NEXT_STATES: dict[DocumentState, frozenset[DocumentState]] = {
    DocumentState.QUEUED: frozenset(
        {DocumentState.PARSING, DocumentState.FAILED, DocumentState.DELETING}
    ),
    DocumentState.PARSING: frozenset(
        {DocumentState.EMBEDDING, DocumentState.FAILED, DocumentState.DELETING}
    ),
    DocumentState.EMBEDDING: frozenset(
        {
            DocumentState.READY,
            DocumentState.PARTIAL,
            DocumentState.FAILED,
            DocumentState.DELETING,
        }
    ),
    DocumentState.READY: frozenset({DocumentState.DELETING}),
    DocumentState.PARTIAL: frozenset({DocumentState.DELETING}),
    DocumentState.FAILED: frozenset({DocumentState.DELETING}),
    DocumentState.DELETING: frozenset(),
    DocumentState.PREFILLING: frozenset(),  # shown while a job runs, and never stored
}

_COLUMNS = (
    "id, collection_id, name, state, media_type, size_bytes, sha256, parser, pages, chunks, "
    "characters, tokens, created_ms, reason, warnings"
)
_READ = _COLUMNS.replace(
    "state",
    f"CASE WHEN state IN ('{DocumentState.READY}', '{DocumentState.PARTIAL}') AND EXISTS "
    "(SELECT 1 FROM jobs WHERE jobs.document_id = documents.id "
    f"AND jobs.kind = '{JobKind.PREFILL}' AND jobs.state = '{JobState.RUNNING}') "
    f"THEN '{DocumentState.PREFILLING}' ELSE state END AS state",
)
_DELETING = DocumentState.DELETING.value
_SEARCHABLE = tuple(state.value for state in DocumentState if state.is_searchable)


@dataclass(frozen=True, slots=True)
class ParsedFacts:
    """What is known of a document once it is parsed."""

    media_type: str
    parser: str
    pages: int
    characters: int
    tokens: int
    warnings: tuple[str, ...]


class Corpus:
    """Documents, passages and term counts in the library's database."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add_collection(self, collection_id: str, fingerprint: str, created_ms: int) -> None:
        """Make sure that a collection exists; an existing one keeps its fingerprint."""
        self._db.execute(
            "INSERT INTO collections VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING",
            *(collection_id, fingerprint, created_ms),
        )

    def foreign_fingerprints(self, fingerprint: str) -> dict[str, str]:
        """Collections with documents whose vectors come from another embedding model."""
        rows = self._db.rows(
            "SELECT id, fingerprint FROM collections WHERE fingerprint <> ? "
            "AND id IN (SELECT collection_id FROM documents)",
            fingerprint,
        )
        return {row["id"]: row["fingerprint"] for row in rows}

    def adopt_fingerprint(self, fingerprint: str) -> None:
        """Give collections without documents the fingerprint of the model in use."""
        self._db.execute(
            "UPDATE collections SET fingerprint = ? "
            "WHERE id NOT IN (SELECT collection_id FROM documents)",
            fingerprint,
        )

    def change_fingerprint(self, fingerprint: str) -> None:
        """Note that all vectors come from the model in use now."""
        self._db.execute("UPDATE collections SET fingerprint = ?", fingerprint)

    def add(self, record: DocumentRecord, replaces: str | None = None) -> None:
        """Insert a document; `replaces` is dropped when this one becomes searchable."""
        self._db.execute(
            f"INSERT INTO documents ({_COLUMNS}, replaces) VALUES ({placeholders(16)})",
            *(record.id, record.collection_id, record.name, record.state.value),
            *(record.media_type, record.size_bytes, record.sha256, record.parser),
            *(record.pages, record.chunks, record.characters, record.tokens),
            *(record.created_ms, record.reason, json.dumps(record.warnings), replaces),
        )

    def add_alias(self, document: DocumentRecord, name: str) -> None:
        """Remember a further name that the same bytes were sent under."""
        if name != document.name:
            self._db.execute(
                "INSERT INTO aliases VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                *(document.id, document.collection_id, name),
            )

    def find_content(self, collection_id: str, sha256: str) -> DocumentRecord | None:
        """The collection's newest document of these bytes that is not being deleted."""
        row = self._db.row(
            f"SELECT {_READ} FROM documents WHERE sha256 = ? AND collection_id = ? "
            "AND state <> ? ORDER BY seq DESC",
            *(sha256, collection_id, _DELETING),
        )
        return None if row is None else _record(row)

    def get(self, scope: Scope, document_id: str, *, even_deleting: bool = False) -> DocumentRecord:
        """One document.

        Raises:
            NotFound: There is none in scope, or it is being deleted and that matters.
        """
        found = self.find(document_id)
        hidden = found is not None and found.state is DocumentState.DELETING and not even_deleting
        if found is None or found.collection_id not in scope or hidden:
            raise NotFound(f"there is no document {document_id!r}")
        return found

    def page(
        self,
        scope: Scope,
        *,
        limit: int,
        after: str | None = None,
        state: DocumentState | None = None,
        name_contains: str | None = None,
    ) -> list[DocumentRecord]:
        """Documents in scope, newest first, from behind the document `after`."""
        conditions = [_in("collection_id", scope.collection_ids), "state <> ?"]
        values: list[SqlValue] = [*sorted(scope.collection_ids), _DELETING]
        if after is not None:
            self.get(scope, after)
            conditions.append("seq < (SELECT seq FROM documents WHERE id = ?)")
            values.append(after)
        if state is not None:
            conditions.append("state = ?")
            values.append(state.value)
        if name_contains is not None:
            conditions.append(
                "(instr(casefold(name), casefold(?)) OR id IN "
                "(SELECT document_id FROM aliases WHERE instr(casefold(name), casefold(?))))"
            )
            values += [name_contains, name_contains]
        rows = self._db.rows(
            f"SELECT {_READ} FROM documents WHERE {' AND '.join(conditions)} "
            "ORDER BY seq DESC LIMIT ?",
            *values,
            limit,
        )
        return [_record(row) for row in rows]

    def move(self, document_id: str, state: DocumentState, reason: str | None = None) -> bool:
        """Move a document forward; `False` when the table has no such step."""
        sources = [source.value for source, nexts in NEXT_STATES.items() if state in nexts]
        changed = self._db.execute(
            f"UPDATE documents SET state = ?, reason = ? WHERE id = ? "
            f"AND state IN ({placeholders(len(sources))})",
            *(state.value, reason, document_id, *sources),
        )
        return changed == 1

    def note(self, document_id: str, reason: str | None) -> None:
        """Say what keeps the work on a document from going on, or that nothing does."""
        self._db.execute("UPDATE documents SET reason = ? WHERE id = ?", reason, document_id)

    def reset(self, document_id: str, state: DocumentState) -> None:
        """Have work on a document go on from a state, whatever it is in; only repairs go back."""
        self._db.execute("UPDATE documents SET state = ? WHERE id = ?", state.value, document_id)

    def put_parsed(self, document_id: str, facts: ParsedFacts) -> None:
        """Record what parsing told."""
        self._db.execute(
            "UPDATE documents SET media_type = ?, parser = ?, pages = ?, characters = ?, "
            "tokens = ?, warnings = ? WHERE id = ?",
            *(facts.media_type, facts.parser, facts.pages, facts.characters, facts.tokens),
            *(json.dumps(facts.warnings), document_id),
        )

    def put_chunks(
        self, document: DocumentRecord, chunks: Sequence[Chunk], terms: Mapping[int, int]
    ) -> None:
        """Replace a document's passages and its count of passages by term."""
        with self._db.transaction():
            self._db.execute("DELETE FROM chunks WHERE document_id = ?", document.id)
            self._db.execute("DELETE FROM terms WHERE document_id = ?", document.id)
            self._db.insert_many(
                f"INSERT INTO chunks VALUES ({placeholders(9)})",
                [_chunk_values(document, chunk) for chunk in chunks],
            )
            self._db.insert_many(
                f"INSERT INTO terms VALUES ({placeholders(4)})",
                [(document.collection_id, term, document.id, n) for term, n in terms.items()],
            )
            self._db.execute(
                "UPDATE documents SET chunks = ? WHERE id = ?", len(chunks), document.id
            )

    def chunks(self, document_id: str) -> list[ChunkRecord]:
        """A document's passages in order."""
        rows = self._db.rows(
            "SELECT * FROM chunks WHERE document_id = ? ORDER BY position", document_id
        )
        return [_chunk(row) for row in rows]

    def find_chunks(
        self, scope: Scope, keys: Iterable[tuple[str, int]]
    ) -> dict[tuple[str, int], tuple[ChunkRecord, str]]:
        """Passages of searchable documents in scope, with the document's name."""
        wanted = list(keys)
        if not wanted:
            return {}
        # The order of the joins is fixed: the planner would go through every passage in scope.
        rows = self._db.rows(
            f"WITH wanted (of, at) AS (VALUES {', '.join(['(?, ?)'] * len(wanted))}) "
            "SELECT chunks.*, documents.name FROM wanted "
            "CROSS JOIN chunks ON document_id = of AND position = at "
            "CROSS JOIN documents ON id = document_id "
            f"WHERE {_in('documents.collection_id', scope.collection_ids)} "
            f"AND state IN ({placeholders(len(_SEARCHABLE))})",
            *(value for key in wanted for value in key),
            *sorted(scope.collection_ids),
            *_SEARCHABLE,
        )
        return {(row["document_id"], row["position"]): (_chunk(row), row["name"]) for row in rows}

    def unsearchable(self, scope: Scope) -> frozenset[str]:
        """Documents in scope that may have points, but must not be found."""
        rows = self._db.rows(
            f"SELECT id FROM documents WHERE {_in('collection_id', scope.collection_ids)} "
            "AND state IN (?, ?)",
            *sorted(scope.collection_ids),
            *(DocumentState.EMBEDDING.value, _DELETING),
        )
        return frozenset(row["id"] for row in rows)

    def frequencies(self, terms: Collection[int], scope: Scope | None) -> dict[int, int]:
        """In how many passages in scope (`None`: anywhere) each term occurs, if in any."""
        inside, values = _inside(scope)
        rows = self._db.rows(
            f"SELECT term, sum(chunks) AS n FROM terms WHERE {inside} "
            f"AND term IN ({placeholders(len(terms))}) GROUP BY term",
            *values,
            *terms,
        )
        return {row["term"]: row["n"] for row in rows}

    def total_chunks(self, scope: Scope | None) -> int:
        """Number of passages in scope, or (`None`) of all."""
        inside, values = _inside(scope)
        rows = self._db.rows(
            f"SELECT coalesce(sum(chunks), 0) AS n FROM documents WHERE {inside}", *values
        )
        return int(rows[0]["n"])

    def find(self, document_id: str) -> DocumentRecord | None:
        """A document in any collection and state, for the library's own work."""
        row = self._db.row(f"SELECT {_READ} FROM documents WHERE id = ?", document_id)
        return None if row is None else _record(row)

    def replaced_by(self, document_id: str) -> DocumentRecord | None:
        """The document that this one takes the place of, if it still exists."""
        row = self._db.row(
            f"SELECT {_READ} FROM documents "
            "WHERE id = (SELECT replaces FROM documents WHERE id = ?)",
            document_id,
        )
        return None if row is None else _record(row)

    def tombstones(self) -> list[DocumentRecord]:
        """Documents whose deletion has begun and not ended."""
        rows = self._db.rows(f"SELECT {_READ} FROM documents WHERE state = ?", _DELETING)
        return [_record(row) for row in rows]

    def all(self) -> list[DocumentRecord]:
        """Every document, oldest first, for the library's own work."""
        return [
            _record(row) for row in self._db.rows(f"SELECT {_READ} FROM documents ORDER BY seq")
        ]

    def ids(self) -> set[str]:
        """Every document that has a row."""
        return {row["id"] for row in self._db.rows("SELECT id FROM documents")}

    def digests(self) -> set[str]:
        """SHA-256 of every original that some document needs."""
        return {row["sha256"] for row in self._db.rows("SELECT DISTINCT sha256 FROM documents")}

    def shares_content(self, document: DocumentRecord) -> bool:
        """Whether another document, in any collection, has the same bytes."""
        return (
            self._db.row(
                "SELECT 1 FROM documents WHERE sha256 = ? AND id <> ?",
                *(document.sha256, document.id),
            )
            is not None
        )

    def remove(self, document_id: str) -> None:
        """Erase a document's rows and all that belong to it."""
        self._db.execute("DELETE FROM documents WHERE id = ?", document_id)

    def count_by_state(self) -> dict[str, int]:
        """Number of documents in each state that occurs."""
        rows = self._db.rows("SELECT state, count(*) AS n FROM documents GROUP BY state")
        return {row["state"]: row["n"] for row in rows}


def _inside(scope: Scope | None) -> tuple[str, list[str]]:
    if scope is None:
        return "TRUE", []
    return _in("collection_id", scope.collection_ids), sorted(scope.collection_ids)


def _in(column: str, values: Collection[str]) -> str:
    return f"{column} IN ({placeholders(len(values))})"


def _record(row: sqlite3.Row) -> DocumentRecord:
    fields = dict(row)
    fields["state"] = DocumentState(fields["state"])
    fields["warnings"] = tuple(json.loads(fields["warnings"]))
    return DocumentRecord(**fields)


def _chunk_values(document: DocumentRecord, chunk: Chunk) -> tuple[SqlValue, ...]:
    place = (chunk.start, chunk.end, chunk.page_start, chunk.page_end)
    return (document.id, chunk.index, document.collection_id, *place, chunk.section, chunk.text)


def _chunk(row: sqlite3.Row) -> ChunkRecord:
    return ChunkRecord(
        document_id=row["document_id"],
        index=row["position"],
        start=row["start"],
        end=row["end"],
        text=row["text"],
        page_start=row["page_start"],
        page_end=row["page_end"],
        section=row["section"],
    )
