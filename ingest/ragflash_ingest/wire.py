"""Documents as bytes, between a parser's process and its owner, and for storage.

JSON and packed boxes instead of pickle: a process that parses hostile files must not be able to
make its owner run code.
"""

import json
from dataclasses import asdict, replace

import numpy as np

from ragflash_ingest.document import BoxTable, Document, DocumentPage, Section


def to_parts(document: Document) -> tuple[bytes, bytes]:
    """Give the JSON, and the boxes as they lie in memory: packing takes longer than a pipe."""
    return to_json(document), document.boxes.boxes.tobytes() if document.boxes else b""


def from_parts(data: bytes, boxes: bytes) -> Document:
    """Undo `to_parts`.

    Raises:
        ValueError, KeyError, TypeError: The bytes are not a document.
    """
    document = from_json(data)
    if not boxes:
        return document
    grid = np.frombuffer(boxes, np.float32).reshape(len(document.text), 4)
    return replace(
        document, boxes=BoxTable.rounded(grid, tuple(page.start for page in document.pages))
    )


def to_json(document: Document) -> bytes:
    """Everything but the boxes, which have a packed form of their own."""
    fields = {
        "text": document.text,
        "pages": [asdict(page) for page in document.pages],
        "sections": [asdict(section) for section in document.sections],
        "media_type": str(document.media_type),
        "encoding": document.encoding,
        "warnings": document.warnings,
        "parser": document.parser,
        "furniture": document.furniture,
        "title": document.title,
    }
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def from_json(data: bytes, boxes: bytes = b"") -> Document:
    """Undo `to_json`; `boxes` is `BoxTable.to_bytes()`, or empty for none.

    Raises:
        ValueError, KeyError, TypeError: The bytes are not a document.
    """
    fields = json.loads(data)
    return Document(
        text=fields["text"],
        pages=tuple(DocumentPage(**page) for page in fields["pages"]),
        sections=tuple(Section(**section) for section in fields["sections"]),
        media_type=fields["media_type"],
        encoding=fields["encoding"],
        warnings=tuple(fields["warnings"]),
        parser=fields["parser"],
        boxes=BoxTable.from_bytes(boxes) if boxes else None,
        furniture=tuple((start, end) for start, end in fields["furniture"]),
        title=fields["title"],
    )
