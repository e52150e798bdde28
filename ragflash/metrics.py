"""Every number that `/metrics` shows, named once.

What happens is counted where it happens; what is (sequences, documents, pages) is asked for when
somebody looks. Labels are words of ours: routes, states, modes; never ids, names or text. The
engine imports nothing of this and keeps plain counters, so that it runs without this library.
"""

from collections.abc import Iterator, Mapping
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = [
    "ANSWERS",
    "ANSWER_SECONDS",
    "CONTENT_TYPE",
    "DROPPED_QUOTES",
    "ENGINE_METRICS",
    "FIRST_TOKEN_SECONDS",
    "HTTP_REQUESTS",
    "HTTP_REQUEST_SECONDS",
    "INGEST_SECONDS",
    "PREFILL_SECONDS",
    "PROMPTS",
    "PROMPT_MISSES",
    "SESSION_METRICS",
    "Kind",
    "count_prompt",
    "count_reuse",
    "exposition",
]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_registry = CollectorRegistry()

HTTP_REQUESTS = Counter(
    "ragflash_http_requests_total",
    "HTTP requests that ended, by route pattern and status.",
    ("method", "route", "status"),
    registry=_registry,
)
HTTP_REQUEST_SECONDS = Histogram(
    "ragflash_http_request_seconds",
    "From the request to the last byte of the reply; a stream lasts as long as it is read.",
    ("route",),
    buckets=_SECONDS,
    registry=_registry,
)
FIRST_TOKEN_SECONDS = Histogram(
    "ragflash_first_token_seconds",
    "From handing a request to the engine to its first token.",
    buckets=_SECONDS,
    registry=_registry,
)
PROMPTS = Counter(
    "ragflash_prompts_total",
    "Prompts that were read, by where what was stored of them was: device, file or none.",
    ("tier",),
    registry=_registry,
)
PROMPT_MISSES = Counter(
    "ragflash_prompt_misses_total",
    "Prompts of which not all that may be stored was, by reason.",
    ("reason",),
    registry=_registry,
)
INGEST_SECONDS = Histogram(
    "ragflash_ingest_seconds",
    "Work on one document from parsing to ready, by how its job ended.",
    ("state",),
    buckets=_SECONDS,
    registry=_registry,
)
PREFILL_SECONDS = Histogram(
    "ragflash_prefill_seconds",
    "Reading one document beforehand, pauses included, by how its job ended.",
    ("state",),
    buckets=_SECONDS,
    registry=_registry,
)
ANSWERS = Counter(
    "ragflash_answers_total",
    "Questions that got a reply, by mode and by whether a quote supports the answer.",
    ("mode", "answered"),
    registry=_registry,
)
ANSWER_SECONDS = Histogram(
    "ragflash_answer_seconds",
    "From a question to its whole answer, by mode.",
    ("mode",),
    buckets=_SECONDS,
    registry=_registry,
)
DROPPED_QUOTES = Counter(
    "ragflash_dropped_quotes_total",
    "Quotes that were not found in the stored text and left out of an answer.",
    registry=_registry,
)


class Kind(Enum):
    """Whether a number only grows."""

    GAUGE = GaugeMetricFamily
    COUNTER = CounterMetricFamily


# Field of the engine's statistics → metric.
ENGINE_METRICS: dict[str, tuple[Kind, str, str]] = {
    "queued": (Kind.GAUGE, "ragflash_queue_depth", "Requests accepted that no slot has."),
    "waiting": (Kind.GAUGE, "ragflash_sequences_waiting", "Sequences of them that are scheduled."),
    "running": (Kind.GAUGE, "ragflash_sequences_running", "Sequences that have a slot."),
    "finished": (
        Kind.COUNTER,
        "ragflash_engine_requests_finished_total",
        "Requests that ended well.",
    ),
    "failed": (
        Kind.COUNTER,
        "ragflash_engine_requests_failed_total",
        "Requests that failed or were cancelled.",
    ),
    "prompt_tokens": (
        Kind.COUNTER,
        "ragflash_prompt_tokens_total",
        "Prompt tokens of finished requests, cached ones included.",
    ),
    "cached_tokens": (
        Kind.COUNTER,
        "ragflash_cached_tokens_total",
        "Prompt tokens whose computation was skipped.",
    ),
    "completion_tokens": (
        Kind.COUNTER,
        "ragflash_completion_tokens_total",
        "Output tokens of finished requests.",
    ),
    "drafted_tokens": (
        Kind.COUNTER,
        "ragflash_drafted_tokens_total",
        "Tokens that were drafted, by source.",
    ),
    "accepted_tokens": (
        Kind.COUNTER,
        "ragflash_accepted_tokens_total",
        "Drafted tokens that became output, by source.",
    ),
    "forward_steps": (Kind.COUNTER, "ragflash_forward_steps_total", "Calls of the model."),
    "forward_rows": (Kind.COUNTER, "ragflash_forward_rows_total", "Rows that they computed."),
    "segments": (Kind.GAUGE, "ragflash_cache_segments", "Prompt segments that are kept."),
    "pages_used": (Kind.GAUGE, "ragflash_cache_pages_used", "Pages that hold keys and values."),
    "pages": (Kind.GAUGE, "ragflash_cache_pages", "Pages that there are."),
    "evictions": (
        Kind.COUNTER,
        "ragflash_cache_evictions_total",
        "Segments that made room for others.",
    ),
}


Numbers = Mapping[str, float | Mapping[str, int]]
"""Numbers by name; what is counted by source or reason is a mapping of its own."""

# Number of the folder of session files, or of its writer → metric.
SESSION_METRICS: dict[str, tuple[Kind, str, str]] = {
    "num_segments": (Kind.GAUGE, "ragflash_sessions", "Session files that can be used."),
    "size_bytes": (Kind.GAUGE, "ragflash_sessions_bytes", "All files, damaged ones included."),
    "quota_bytes": (Kind.GAUGE, "ragflash_sessions_quota_bytes", "Most that they may take."),
    "largest_collection_bytes": (
        Kind.GAUGE,
        "ragflash_sessions_largest_collection_bytes",
        "Files of the collection that has most of them.",
    ),
    "collection_quota_bytes": (
        Kind.GAUGE,
        "ragflash_sessions_collection_quota_bytes",
        "Most that files of one collection may take.",
    ),
    "num_set_aside": (
        Kind.COUNTER,
        "ragflash_sessions_damaged_total",
        "Damaged files that were found.",
    ),
    "written_today_bytes": (
        Kind.GAUGE,
        "ragflash_sessions_written_today_bytes",
        "Written, or set out to be, since midnight (UTC).",
    ),
    "daily_write_bytes": (
        Kind.GAUGE,
        "ragflash_sessions_daily_write_bytes",
        "Most that may be written in a day.",
    ),
    "saved": (Kind.COUNTER, "ragflash_sessions_saved_total", "Files that were written."),
    "dropped": (
        Kind.COUNTER,
        "ragflash_sessions_dropped_total",
        "Files not written because too much was waiting.",
    ),
    "refused": (
        Kind.COUNTER,
        "ragflash_sessions_refused_total",
        "Files not written, by reason.",
    ),
    "queued_bytes": (Kind.GAUGE, "ragflash_sessions_queued_bytes", "Waiting to be written."),
}


def count_prompt(first_token_s: float, tier: str, miss_reason: str | None) -> None:
    """Count a prompt that was read for an answer."""
    FIRST_TOKEN_SECONDS.observe(first_token_s)
    count_reuse(tier, miss_reason)


def count_reuse(tier: str, miss_reason: str | None) -> None:
    """Count a prompt that was read, whether or not it gets an answer."""
    PROMPTS.labels(tier).inc()
    if miss_reason is not None:
        PROMPT_MISSES.labels(miss_reason).inc()


def exposition(
    *,
    is_ready: bool,
    engine: Numbers | None,
    documents: Mapping[str, int] | None,
    jobs: Mapping[str, int] | None,
    sessions: Numbers | None,
) -> bytes:
    """Write everything in Prometheus' text format, 0.0.4.

    Args:
        is_ready: Whether documents can be added and questions answered.
        engine: Numbers by the keys of `ENGINE_METRICS`; `None` while there is no engine.
        documents: Number by state; `None` while there is no library.
        jobs: Likewise.
        sessions: Numbers by the keys of `SESSION_METRICS`; `None` where none are kept.
    """
    present = CollectorRegistry()
    present.register(_Present(is_ready, engine, documents, jobs, sessions))
    return generate_latest(_registry) + generate_latest(present)


class _Present(Collector):
    def __init__(
        self,
        is_ready: bool,  # noqa: FBT001  (private)
        engine: Numbers | None,
        documents: Mapping[str, int] | None,
        jobs: Mapping[str, int] | None,
        sessions: Numbers | None,
    ) -> None:
        self._is_ready = is_ready
        self._engine = engine
        self._documents = documents
        self._jobs = jobs
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        """Yield what is known at this moment."""
        yield GaugeMetricFamily("ragflash_ready", "1 when everything is loaded.", self._is_ready)
        for known, numbers, label in (
            (ENGINE_METRICS, self._engine, "source"),
            (SESSION_METRICS, self._sessions, "reason"),
        ):
            for field, (kind, name, said) in known.items():
                if numbers is not None:
                    yield _metric(kind, name, said, label, numbers[field])
        if self._documents is not None:
            yield _labelled(
                Kind.GAUGE, "ragflash_documents", "Documents by state.", "state", self._documents
            )
        if self._jobs is not None:
            yield _labelled(Kind.GAUGE, "ragflash_jobs", "Jobs by state.", "state", self._jobs)


def _metric(
    kind: Kind, name: str, said: str, label: str, number: float | Mapping[str, int]
) -> Metric:
    if isinstance(number, Mapping):
        return _labelled(kind, name, said, label, number)
    family: Metric = kind.value(name, said, number)
    return family


def _labelled(kind: Kind, name: str, said: str, label: str, numbers: Mapping[str, int]) -> Metric:
    family: GaugeMetricFamily | CounterMetricFamily = kind.value(name, said, labels=(label,))
    for value, number in numbers.items():
        family.add_metric((value,), number)
    return family
