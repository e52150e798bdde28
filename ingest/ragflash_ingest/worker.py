"""The parsers' process: `python -m ragflash_ingest.worker FD MEMORY_BYTES`.

Messages, each one `send_bytes`: in, a name and a file's bytes; out, any number of progress
messages and then either a document (JSON, then boxes) or an error.
"""

import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection

from ragflash_ingest import wire
from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.parsers import parse_bytes


def main(descriptor: int, memory_bytes: int) -> None:
    """Serve until the owner closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which then closes
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(descriptor)
    connection.send_bytes(json.dumps({"ready": os.getpid()}).encode())
    while True:
        try:
            name = connection.recv_bytes().decode("utf-8", "surrogatepass")
            data = connection.recv_bytes()
        except EOFError:
            return
        _serve(connection, data, name)


def _serve(connection: Connection, data: bytes, name: str) -> None:
    def report(stage: str, done: int, total: int) -> None:
        connection.send_bytes(json.dumps({"progress": [stage, done, total]}).encode())

    try:
        document = parse_bytes(data, name, report)
        body, boxes = wire.to_parts(document)
    except ParseError as error:
        failure = {"reason": error.reason, "detail": error.detail}
    except MemoryError:
        detail = "the file needs more memory than a parser may use"
        failure = {"reason": FailureReason.OUT_OF_MEMORY, "detail": detail}
    else:
        connection.send_bytes(b'{"document": true}')
        connection.send_bytes(body)
        connection.send_bytes(boxes)
        return
    connection.send_bytes(json.dumps({"failure": failure}).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
