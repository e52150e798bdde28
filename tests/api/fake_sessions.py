"""Files of remembered prompts without a disk."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ragflash.sessions import SessionCounts, SessionInfo


class FakeSessions:
    """Files of remembered prompts in a dictionary."""

    def __init__(self) -> None:
        self.infos: dict[str, SessionInfo] = {}

    def add(self, source_ids: tuple[str, ...], namespace: str = "default") -> str:
        id_ = f"{len(self.infos):064x}"
        self.infos[id_] = SessionInfo(
            id_, namespace, source_ids, 30, 40, 8192, 1.5, 100.0, 200.25, pinned=False
        )
        return id_

    def list(self) -> Sequence[SessionInfo]:
        return [*self.infos.values()]

    def pin(self, session_id: str) -> None:
        self.infos[session_id] = replace(self.infos[session_id], pinned=True)

    def unpin(self, session_id: str) -> None:
        self.infos[session_id] = replace(self.infos[session_id], pinned=False)

    def delete(self, session_id: str) -> int:
        del self.infos[session_id]
        return 1

    def counts(self) -> SessionCounts:
        size = 8192 * len(self.infos)
        return SessionCounts(len(self.infos), size, size, 3, 5, 1 << 20, math.inf, 1e6)
