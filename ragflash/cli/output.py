"""What a command says: text for people, or one JSON object for programs.

With `--json` standard output is exactly one object; progress and complaints go to standard error.
Where standard error is not a terminal, progress is plain lines.

Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 not found, 4 busy or locked, 5 model missing,
130 interrupted.
"""

import json
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ragflash.errors import (
    DataFolderLocked,
    EngineOverloaded,
    ModelMissing,
    NotFound,
    QuestionBlank,
    RagflashError,
    SettingInvalid,
)

__all__ = ["EXIT_CODES", "Output", "Tracker", "error_object"]

EXIT_CODES: dict[type[RagflashError], int] = {
    RagflashError: 1,
    SettingInvalid: 2,
    QuestionBlank: 2,
    NotFound: 3,
    DataFolderLocked: 4,
    EngineOverloaded: 4,
    ModelMissing: 5,
}

_LINE_EVERY_S = 10.0


class Tracker(Protocol):
    """Is told how far something is."""

    def __call__(self, label: str, done: int, total: int) -> None:
        """Take note that `done` of `total` is reached; a total of 0 is not known."""


class Output:
    """Where a command's words go.

    At the end of `with` a JSON command says its one object, and a failure on purpose ends the
    command with a sentence and its exit code.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._people = _console(stderr=False)
        self._aside = _console(stderr=True)
        self._object: dict[str, Any] | None = None

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._write_object()
        elif isinstance(error, RagflashError):
            self.complain(f"error: {error.detail}")
            self._object = error_object(error)
            self._write_object()
            code = next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)
            raise typer.Exit(code) from error

    def _write_object(self) -> None:
        if self.as_json and self._object is not None:
            sys.stdout.write(json.dumps(self._object, ensure_ascii=False) + "\n")

    def say(self, text: str = "") -> None:
        """Tell people something; programs are not interested."""
        if not self.as_json:
            self._people.print(_printable(text))

    def show(self, table: Table) -> None:
        """Show people a table."""
        if not self.as_json:
            self._people.print(table)

    def complain(self, text: str) -> None:
        """Tell whoever is watching, beside the result."""
        self._aside.print(_printable(text))

    def result(self, body: BaseModel | dict[str, Any]) -> None:
        """Set the object that a program gets."""
        self._object = body.model_dump(mode="json") if isinstance(body, BaseModel) else body

    @contextmanager
    def progress(self) -> Iterator[Tracker]:
        """Show how far something is: bars on a terminal, now and then a line elsewhere."""
        if self._aside.is_terminal:
            with _bars(self._aside) as bars:
                yield _BarTracker(bars)
        else:
            yield _LineTracker(self._aside)


class _BarTracker:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def __call__(self, label: str, done: int, total: int) -> None:
        label = _printable(label)
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=None)
        self._bars.update(self._tasks[label], completed=done, total=total or None)


class _LineTracker:
    """One line when something new begins or ends, and every ten seconds in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, tuple[float, int]] = {}

    def __call__(self, label: str, done: int, total: int) -> None:
        said_at, said = self._said.get(label, (float("-inf"), -1))
        now = time.monotonic()
        ended = total > 0 and done == total
        if said == done or (now - said_at < _LINE_EVERY_S and not ended):
            return
        self._said[label] = (now, done)
        count = f" {done} of {total}" if total else ""
        self._console.print(_printable(f"{label}{count}"))


def error_object(error: RagflashError) -> dict[str, Any]:
    """Give a failure the form in which programs get it."""
    return {
        "error": {
            "code": error.code,
            "title": error.title,
            "detail": error.detail,
            "retryable": error.retryable,
        }
    }


def _console(*, stderr: bool) -> Console:
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _printable(text: str) -> str:
    """Take out control characters: names and quotes come from strangers, and terminals obey."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\ufffd" for char in text
    )
