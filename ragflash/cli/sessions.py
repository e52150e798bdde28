"""Commands around the files of remembered prompts; those that change nothing go beside a server."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ragflash.api.document_schemas import JobOut
from ragflash.cli.documents import DocumentArgument
from ragflash.cli.options import (
    CtxOption,
    DataDirOption,
    DeviceOption,
    JsonOption,
    KvOption,
    ModelOption,
    VramOption,
)
from ragflash.cli.output import Output
from ragflash.cli.parts import find_document
from ragflash.cli.prefill import read_ahead, reading_library
from ragflash.cli.session_files import open_sessions
from ragflash.errors import InputError, NotFound, StorageError
from ragflash.settings import Settings, load_settings

if TYPE_CHECKING:
    from ragflash.sessions import SessionCounts, SessionFolder

app = typer.Typer(
    help="Look at files of remembered prompts, keep or remove them.", no_args_is_help=True
)

_SHOWN_DIGITS = 12

IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Or its first digits.", show_default=False)
]


@app.command("list")
def list_sessions(*, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """List files, the last used first."""
    with Output(as_json=as_json) as output:
        from ragflash.api.session_schemas import SessionListOut, SessionOut  # noqa: PLC0415

        settings = load_settings(data_dir=data_dir)
        with _reading(settings) as folder:
            infos, counts = folder.list(), folder.counts()
        shown = [SessionOut.of_file(info, {}) for info in infos]
        found = SessionListOut.of_files(infos, shown, counts)
        table = Table("id", "documents", "tokens", "MB", "saves", "last used", "pinned", box=None)
        for each in found.data:
            table.add_row(
                each.id[:_SHOWN_DIGITS],
                ", ".join(document.id for document in each.documents) or "none",
                f"{each.end_tokens - each.tokens}–{each.end_tokens}",
                f"{each.file_bytes / 1e6:.1f}",
                f"{each.prefill_seconds:.1f} s",
                time.strftime("%Y-%m-%d %H:%M", time.localtime(each.last_used_ms / 1000)),
                "yes" if each.pinned else "",
            )
        if found.data:
            output.show(table)
        else:
            output.say("no sessions are stored")
        output.result(found)


@app.command()
def prefill(
    document: DocumentArgument,
    *,
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    vram_gb: VramOption = None,
    context_tokens: CtxOption = None,
    kv_format: KvOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have the model read a document, so that the first question about it need not wait.

    What was read is used by whatever runs the same model with the same settings.
    """
    with Output(as_json=as_json) as output:
        settings = load_settings(
            data_dir=data_dir,
            model=model,
            device=device,
            vram_gb=vram_gb,
            context_tokens=context_tokens,
            kv_format=kv_format,
        )
        with reading_library(settings) as library, output.progress() as track:
            record = find_document(library, document)
            job = read_ahead(library, record, track)
        output.say(f"{record.name} is read: {job.total} tokens")
        output.result(JobOut.of(job))


@app.command()
def verify(*, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Read every file whole; damaged ones, which are never used, make the exit code 1."""
    with Output(as_json=as_json) as output:
        with _reading(load_settings(data_dir=data_dir)) as folder:
            num_files = len(folder.list())
            damaged = folder.verify()
        for id_ in damaged:
            output.say(f"{id_}: damaged")
        output.say(f"{num_files - len(damaged)} of {num_files} files are sound")
        output.result({"files": num_files, "damaged": list(damaged)})
    if damaged:
        raise typer.Exit(1)


@app.command()
def gc(*, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Remove what is of no use, and what is beyond RAGFLASH_SESSIONS_GB."""
    with Output(as_json=as_json) as output:
        with _writing(load_settings(data_dir=data_dir)) as folder:
            before = folder.counts()
            after = folder.gc()
        output.say(f"before: {_describe(before)}\nafter: {_describe(after)}")
        output.result({"files": after.num_segments, "file_bytes": after.size_bytes})


@app.command()
def pin(
    session: IdArgument, *, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """Keep a file, and those before it in the prompt, when room has to be made."""
    _mark(session, data_dir, as_json=as_json, pinned=True)


@app.command()
def unpin(
    session: IdArgument, *, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """Let a file go when room has to be made."""
    _mark(session, data_dir, as_json=as_json, pinned=False)


@app.command()
def delete(
    session: IdArgument, *, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """Remove a file and all that follow it in a prompt, pinned or not."""
    with Output(as_json=as_json) as output:
        with _writing(load_settings(data_dir=data_dir)) as folder:
            id_ = _find(folder, session)
            num_files = folder.delete(id_)
        output.say(f"deleted {id_}: {num_files} file{'' if num_files == 1 else 's'}")
        output.result({"deleted": id_, "files": num_files})


@app.command()
def export(
    session: IdArgument,
    target: Annotated[Path, typer.Argument(help="File to write.", show_default=False)],
    *,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a file after reading all of it; what the prompt has before it is in files of its own."""
    with Output(as_json=as_json) as output:
        with _reading(load_settings(data_dir=data_dir)) as folder:
            id_ = _find(folder, session)
            folder.export(id_, target)
        output.say(f"{id_} is in {target}")
        output.result({"exported": id_, "path": str(target)})


@app.command("import")
def import_file(
    source: Annotated[Path, typer.Argument(help="An exported file.", show_default=False)],
    *,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take an exported file in; it is used once what the prompt has before it is stored too."""
    with Output(as_json=as_json) as output:
        if not source.is_file():
            raise NotFound(f"there is no file {source}")
        with _writing(load_settings(data_dir=data_dir)) as folder:
            refused = folder.import_file(source)
        if refused is not None and refused.reason != "already_stored":
            reason = f"{refused.reason} {refused.detail}".rstrip()
            raise StorageError(f"{source} was not taken in: {reason}")
        output.say(f"{source} is stored" if refused is None else f"{source} was stored already")
        output.result({"path": str(source), "already_stored": refused is not None})


def _mark(session: str, data_dir: Path | None, *, as_json: bool, pinned: bool) -> None:
    word = "pinned" if pinned else "unpinned"
    with Output(as_json=as_json) as output:
        with _writing(load_settings(data_dir=data_dir)) as folder:
            id_ = _find(folder, session)
            (folder.pin if pinned else folder.unpin)(id_)
        output.say(f"{word} {id_}")
        output.result({word: id_})


@contextmanager
def _reading(settings: Settings) -> "Iterator[SessionFolder]":
    folder = open_sessions(settings, read_only=True)
    try:
        yield folder
    finally:
        folder.close()


@contextmanager
def _writing(settings: Settings) -> "Iterator[SessionFolder]":
    """Take the data folder, so that no server starts meanwhile; raises `DataFolderLocked`."""
    from ragflash.rag.files import FolderLock  # noqa: PLC0415  (loads the parsers' names)

    lock = FolderLock.acquire(settings.data_dir)
    try:
        folder = open_sessions(settings)
        try:
            yield folder
        finally:
            folder.close()
    finally:
        lock.release()


def _find(folder: "SessionFolder", digits: str) -> str:
    """Return the id that begins with these digits.

    Raises:
        NotFound: None does.
        InputError: Several do.
    """
    found = [info.id for info in folder.list() if info.id.startswith(digits.lower())]
    if not found:
        raise NotFound(f"there is no session {digits}; `ragflash sessions list` lists them")
    if len(found) > 1:
        raise InputError(f"{len(found)} sessions begin with {digits!r}: give more digits")
    return found[0]


def _describe(counts: "SessionCounts") -> str:
    return f"{counts.num_segments} files, {counts.size_bytes / 1e6:.1f} MB"
