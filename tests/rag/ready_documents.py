"""Records of documents that are ready, for what looks at a few fields only."""

from dataclasses import replace

from ragflash.rag.records import DocumentRecord, DocumentState


def ready_document(id_: str, **changes: object) -> DocumentRecord:
    """A text of a page in collection `mine`, but for the `changes`."""
    made = DocumentRecord(
        id=id_,
        collection_id="mine",
        name=f"{id_}.txt",
        state=DocumentState.READY,
        media_type="text/plain",
        size_bytes=1,
        sha256="00",
        parser="test",
        pages=1,
        chunks=1,
        characters=1,
        tokens=1,
        created_ms=0,
    )
    return replace(made, **changes)
