"""Commands around stored documents: ingest, search, list, show, delete."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragflash.api.document_schemas import DocumentOut
from ragflash.api.schemas import HitOut, SearchOut
from ragflash.cli.options import DataDirOption, JsonOption, ModelOption
from ragflash.cli.output import Output, Tracker, error_object
from ragflash.cli.parts import SCOPE, every_document, find_document, model_path, open_library
from ragflash.cli.prefill import read_ahead, reading_library
from ragflash.errors import DocumentUnreadable, NotFound, RagflashError
from ragflash.rag.records import (
    DEFAULT_COLLECTION,
    DocumentRecord,
    DuplicatePolicy,
    SearchMode,
)
from ragflash.settings import load_settings

if TYPE_CHECKING:
    from ragflash.rag.library import Library

app = typer.Typer(help="List, show or delete documents.", no_args_is_help=True)

DocumentArgument = Annotated[str, typer.Argument(metavar="ID|NAME", show_default=False)]


def ingest(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, or folders of files.")
    ],
    *,
    on_duplicate: Annotated[
        DuplicatePolicy, typer.Option(help="What to do with bytes that are already there.")
    ] = DuplicatePolicy.REUSE,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Have the model read them too, before anybody asks.")
    ] = False,
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read documents in.

    A file that cannot be read does not stop the others, and makes the exit code 1.
    """
    with Output(as_json=as_json) as output:
        settings = load_settings(data_dir=data_dir, model=model)
        model_path(settings)  # its tokens are counted
        failures: list[dict[str, Any]] = []
        read: list[DocumentRecord] = []
        opened = reading_library(settings) if prefill else closing(open_library(settings))
        with opened as library, output.progress() as track:
            for path in _files(paths):
                try:
                    read.append(read_in(library, path, track, on_duplicate))
                    if prefill:
                        read_ahead(library, read[-1], track)
                except RagflashError as error:
                    output.complain(f"{path}: {error.detail}")
                    failures.append({"path": str(path), **error_object(error)})
        for record in read:
            output.say(describe(record))
        shown = [DocumentOut.of(record).model_dump(mode="json") for record in read]
        output.result({"documents": shown, "failures": failures})
    if failures:
        raise typer.Exit(1)


def search(
    query: Annotated[str, typer.Argument(show_default=False)],
    *,
    document: Annotated[
        list[str] | None, typer.Option(help="Id or name of a document to look in; repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most passages shown.")] = 5,
    mode: Annotated[SearchMode, typer.Option(help="Which legs run.")] = SearchMode.HYBRID,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find passages, without an answer."""
    with Output(as_json=as_json) as output:
        library = open_library(load_settings(data_dir=data_dir))
        try:
            ids = [find_document(library, name).id for name in document] if document else None
            hits = library.search(SCOPE, query, document_ids=ids, limit=limit, mode=mode)
        finally:
            library.close()
        for number, hit in enumerate(hits, 1):
            chunk = hit.chunk
            place = f"{hit.document_name}, page {chunk.page_start}"
            output.say(f"{number}. {place}, characters {chunk.start}–{chunk.end}")
            output.say(f"   {' '.join(chunk.text.split())}\n")
        if not hits:
            output.say("nothing found")
        found = tuple(HitOut.of(hit) for hit in hits)
        output.result(SearchOut(query=query, mode=mode, data=found))


@app.command("list")
def list_documents(*, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """List documents, newest first."""
    with Output(as_json=as_json) as output:
        library = open_library(load_settings(data_dir=data_dir))
        try:
            records = list(every_document(library))
        finally:
            library.close()
        table = Table("id", "name", "state", "pages", "tokens", box=None)
        for record in records:
            table.add_row(
                record.id, record.name, record.state, str(record.pages), str(record.tokens)
            )
        output.show(table)
        output.result(
            {"documents": [DocumentOut.of(record).model_dump(mode="json") for record in records]}
        )


@app.command()
def show(
    document: DocumentArgument, *, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """Show what is known about a document."""
    with Output(as_json=as_json) as output:
        library = open_library(load_settings(data_dir=data_dir))
        try:
            shown = DocumentOut.of(find_document(library, document))
        finally:
            library.close()
        for name, value in shown.model_dump(mode="json").items():
            output.say(f"{name}: {value}")
        output.result(shown)


@app.command()
def delete(
    document: DocumentArgument, *, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """Delete a document; afterwards nothing finds it any more."""
    with Output(as_json=as_json) as output:
        library = open_library(load_settings(data_dir=data_dir))
        try:
            record = find_document(library, document)
            library.delete(SCOPE, record.id)
        finally:
            library.close()
        output.say(f"deleted {record.name} ({record.id})")
        output.result({"deleted": record.id, "name": record.name})


def read_in(
    library: "Library",
    path: Path,
    track: Tracker,
    on_duplicate: DuplicatePolicy = DuplicatePolicy.REUSE,
) -> DocumentRecord:
    """Add one file and wait until it can be asked.

    Raises:
        NotFound: There is no such file.
        DocumentUnreadable: The file was stored, but there is nothing to read in it.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {path}")
    added = library.add(SCOPE, DEFAULT_COLLECTION, path.name, path, on_duplicate)
    last = added.job
    for last in library.watch(SCOPE, added.job.id):
        if last.retry_at_ms is not None:
            track(f"{path.name}: {last.detail}; trying again soon", 0, 0)
        else:
            track(f"{path.name}: {last.stage or last.state}", last.done, last.total)
    record = library.get(SCOPE, added.document.id)
    if not record.state.is_searchable:
        raise DocumentUnreadable(record.reason or last.state, last.detail or "it was not read")
    return record


def describe(record: DocumentRecord) -> str:
    """Sum a document up in a line."""
    pages = f"{record.pages} page{'' if record.pages == 1 else 's'}"
    warned = "".join(f"\n  note: {warning}" for warning in record.warnings)
    return (
        f"{record.name}: {record.state}, {pages}, {record.chunks} passages, "
        f"{record.tokens} tokens, id {record.id}{warned}"
    )


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Go through files and what lies in folders, hidden things left out."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for found in sorted(path.rglob("*")):
            inner = found.relative_to(path).parts
            if found.is_file() and not any(part.startswith(".") for part in inner):
                yield found
