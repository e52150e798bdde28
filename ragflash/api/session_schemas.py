"""What routes and commands say of remembered prompts."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field

from ragflash.api.schemas import Reply, Rounded
from ragflash.sessions import SessionCounts, SessionInfo


def collections_of(namespace: str) -> tuple[str, ...]:
    """Return the collections whose text may be in prompts of a namespace."""
    return tuple(namespace.split("\x1f"))


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
    device_bytes: int = Field(description="Of memory, while it is there too.")
    prefill_seconds: Rounded = Field(description="That computing it took: what a use saves.")
    created_ms: int
    last_used_ms: int
    pinned: bool

    @classmethod
    def of_file(
        cls, info: SessionInfo, names: Mapping[str, str], device_bytes: int = 0
    ) -> "SessionOut":
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
            device_bytes=device_bytes,
            prefill_seconds=info.prefill_seconds,
            created_ms=round(1000 * info.created_s),
            last_used_ms=round(1000 * info.last_used_s),
            pinned=info.pinned,
        )


class SessionCollection(Reply):
    """What files with text of these collections take; more than one where a prompt joins them."""

    collections: tuple[str, ...]
    file_bytes: int


class SessionLimitsOut(Reply):
    """What files may take; `null` where no limit is set."""

    quota_bytes: int
    collection_quota_bytes: int | None
    daily_write_bytes: int | None
    written_today_bytes: int

    @classmethod
    def of_counts(cls, counts: SessionCounts) -> "SessionLimitsOut":
        """Read them off what a folder counts."""
        return cls(
            quota_bytes=counts.quota_bytes,
            collection_quota_bytes=_finite(counts.collection_quota_bytes),
            daily_write_bytes=_finite(counts.daily_write_bytes),
            written_today_bytes=counts.written_today_bytes,
        )


def _finite(limit: float) -> int | None:
    return None if math.isinf(limit) else int(limit)


class SessionListOut(Reply):
    """All stored prompts, the last used first; none where `enabled` is false.

    `device_bytes` are those of the listed ones; other prompts may be in memory alone.
    """

    object: Literal["list"] = "list"
    enabled: bool
    file_bytes: int = 0
    device_bytes: int = 0
    limits: SessionLimitsOut | None = None
    collections: tuple[SessionCollection, ...] = ()
    data: tuple[SessionOut, ...] = ()

    @classmethod
    def of_files(
        cls, infos: Sequence[SessionInfo], shown: Sequence[SessionOut], counts: SessionCounts
    ) -> "SessionListOut":
        """Sum up files, each of which is shown."""
        sizes: dict[str, int] = {}
        for info in infos:
            sizes[info.namespace] = sizes.get(info.namespace, 0) + info.size_bytes
        return cls(
            enabled=counts.quota_bytes > 0,
            file_bytes=sum(sizes.values()),
            device_bytes=sum(each.device_bytes for each in shown),
            limits=SessionLimitsOut.of_counts(counts),
            collections=tuple(
                SessionCollection(collections=collections_of(name), file_bytes=size)
                for name, size in sorted(sizes.items())
            ),
            data=tuple(shown),
        )
