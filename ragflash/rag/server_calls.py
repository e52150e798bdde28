"""Calls to a Qdrant server: tried again after passing faults, explained when they fail."""

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import httpx
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import (
    ApiException,
    ResponseHandlingException,
    UnexpectedResponse,
)

from ragflash.errors import VectorStoreUnavailable

_SHOWN_CHARACTERS = 300
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a passing fault is waited out: exponential back-off with full jitter.

    Attributes:
        attempts: Of one operation, the first included.
        first_s: Longest pause before the second attempt; doubles with each.
        longest_s: No pause is longer.
    """

    attempts: int = 5
    first_s: float = 0.2
    longest_s: float = 5.0

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each further attempt."""
        for number in range(self.attempts - 1):
            yield random.uniform(0, min(self.longest_s, self.first_s * 2**number))


@dataclass(frozen=True, slots=True)
class ServerCalls:
    """Carries out operations that may be repeated.

    Server errors, time-outs and broken connections are tried again; what the server refuses
    (4xx) is not, since it would be refused again.
    """

    url: str
    retry: RetryPolicy

    def run(self, what: str, operation: Callable[[], _T]) -> _T:
        """Do what `what` names ("write points").

        Raises:
            VectorStoreUnavailable: It could not be done; says what to do.
        """
        pauses = self.retry.pauses()
        while True:
            try:
                return operation()
            except (ApiException, QdrantException) as error:
                pause_s = next(pauses, None) if _may_pass(error) else None
                if pause_s is None:
                    raise self._explain(what, error) from error
                _log.warning("the Qdrant server could not %s; trying again", what)
            time.sleep(pause_s)

    def _explain(self, what: str, error: Exception) -> VectorStoreUnavailable:
        refused = f"the Qdrant server at {self.url} could not {what}"
        if isinstance(error, UnexpectedResponse):
            return VectorStoreUnavailable(f"{refused}: {_explain_status(error)}")
        if not isinstance(error, ResponseHandlingException):
            return VectorStoreUnavailable(f"{refused}: {error}")
        told = f"{type(error.source).__name__}: {error.source}".rstrip(": ")
        if not isinstance(error.source, httpx.TransportError):
            return VectorStoreUnavailable(
                f"{refused}: its answer is not understood ({told}): is it a Qdrant 1.x server?"
            )
        return VectorStoreUnavailable(
            f"{refused} ({told}): see that it runs and that RAGFLASH_QDRANT_URL is its address; "
            "RAGFLASH_QDRANT_TIMEOUT_S says how long an answer is waited for"
        )


def _explain_status(error: UnexpectedResponse) -> str:
    if error.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        return (
            f"it refused the key ({error.status_code}): set RAGFLASH_QDRANT_API_KEY to a key of "
            "the server that may read and write"
        )
    told = error.content.decode("utf-8", "replace")[:_SHOWN_CHARACTERS]
    return f"it answered {error.status_code}: {told or error.reason_phrase}"


def _may_pass(error: Exception) -> bool:
    """Whether the same request can succeed later: not after what the server refused."""
    if isinstance(error, UnexpectedResponse):
        return error.status_code is not None and error.status_code >= 500
    return isinstance(error, ResponseHandlingException) and isinstance(
        error.source, httpx.TransportError
    )
