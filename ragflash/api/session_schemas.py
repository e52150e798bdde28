"""What routes and commands say of remembered prompts."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from ragflash.api.schemas import Reply, Rounded, UsageOut
from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.sessions import SessionInfo


class SessionKind(StrEnum):
    """What text a stored prompt holds: of no document, of one, or of several."""

    PROMPT = "prompt"
    DOCUMENT = "document"
    BUNDLE = "bundle"


class SessionDocument(Reply):
    """A document whose text is in a stored prompt; `name` is `null` where it is not known."""

    id: str
    name: str | None


class SessionOut(Reply):
    """A file of a stored run of prompt tokens; it follows the one before it in the prompt."""

    object: Literal["session"] = "session"
    id: str
    kind: SessionKind
    documents: tuple[SessionDocument, ...]
    tokens: int = Field(description="Of its own.")
    end_tokens: int = Field(description="From the start of the prompt to its end.")
    file_bytes: int
    prefill_seconds: Rounded = Field(description="That computing it took: what a use saves.")
    created_ms: int
    last_used_ms: int
    pinned: bool

    @classmethod
    def of_file(cls, info: SessionInfo, names: dict[str, str]) -> "SessionOut":
        """Describe a file, with the names of documents by id as far as they are known."""
        kinds = (SessionKind.PROMPT, SessionKind.DOCUMENT, SessionKind.BUNDLE)
        return cls(
            id=info.id,
            kind=kinds[min(2, len(info.source_ids))],
            documents=tuple(
                SessionDocument(id=id_, name=names.get(id_)) for id_ in info.source_ids
            ),
            tokens=info.num_tokens,
            end_tokens=info.end,
            file_bytes=info.size_bytes,
            prefill_seconds=info.prefill_seconds,
            created_ms=round(1000 * info.created_s),
            last_used_ms=round(1000 * info.last_used_s),
            pinned=info.pinned,
        )


class SessionListOut(Reply):
    """All stored prompts, the last used first; none where `enabled` is false."""

    object: Literal["list"] = "list"
    enabled: bool
    file_bytes: int
    data: tuple[SessionOut, ...]


class PrefilledOut(Reply):
    """A document was read; `usage.cached_tokens` had been read before."""

    object: Literal["prefilled"] = "prefilled"
    document: str = Field(validation_alias="document_id")
    usage: UsageOut
    total_ms: Rounded
    cache_tier: CacheTier
    miss_reason: CacheMiss | None
