import io
import json
import logging

import pytest

from ragflash import log
from ragflash.log import LogFormat


@pytest.fixture
def written():
    """Configures logging into a text that is read at the end; puts everything back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []

    def configure(level: str, style: LogFormat) -> io.StringIO:
        stream = io.StringIO()
        log.configure(level, style, stream)
        return stream

    yield configure
    root.handlers, root.level = handlers, level


def test_json_lines_carry_fields_and_the_request(written) -> None:
    stream = written("info", LogFormat.JSON)
    token = log.request_id.set("trace-1")
    logging.getLogger("ragflash.x").info("prefill finished", extra={"tokens": 12})
    log.request_id.reset(token)
    logging.getLogger("ragflash.x").debug("a document's text")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 1
    assert (
        lines[0].items()
        >= {
            "level": "info",
            "logger": "ragflash.x",
            "event": "prefill finished",
            "request_id": "trace-1",
            "tokens": 12,
        }.items()
    )


@pytest.mark.parametrize("value", ["a b", 'say "x"', "k=v", "two\nlines", ""])
def test_text_lines_stay_one_line_and_readable(written, value: str) -> None:
    stream = written("info", LogFormat.TEXT)
    logging.getLogger("x").info("done", extra={"name_given": value, "n": 1})
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert f"name_given={json.dumps(value)}" in line
    assert line.endswith(" n=1\n")


def test_tracebacks_are_fields(written) -> None:
    stream = written("info", LogFormat.JSON)
    logging.getLogger("x").error("request broke", exc_info=KeyError("lost"))
    entry = json.loads(stream.getvalue())
    assert entry["event"] == "request broke"
    assert entry["traceback"].endswith("KeyError: 'lost'")
