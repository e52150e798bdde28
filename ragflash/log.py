"""One line an event, as key=value or JSON, each with the id of the HTTP request it belongs to.

Library code logs through `logging` and never configures it; `configure` is for the command line.
Numbers go in `extra={"tokens": 12}`. Text of documents and prompts is logged at DEBUG only.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

__all__ = ["LogFormat", "configure", "request_id"]

request_id: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "color_message",  # uvicorn's copy of the message for terminals
}


class LogFormat(StrEnum):
    """How a log line is spelled."""

    TEXT = "text"
    JSON = "json"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    if current := request_id.get():
        found["request_id"] = current
    found |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
    return found


class _Formatter(logging.Formatter):
    def __init__(self, style: LogFormat) -> None:
        super().__init__()
        self._spelling = style

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if self._spelling is LogFormat.JSON:
            return json.dumps(fields, ensure_ascii=False, default=str)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=')
    return text if plain and text else json.dumps(text, ensure_ascii=False)


def configure(level: str, style: LogFormat, stream: TextIO | None = None) -> None:
    """Send every logger's records to `stream` (stderr), replacing what was configured before."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Formatter(style))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
