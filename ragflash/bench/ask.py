"""What reading a document once is worth: questions about one that is read, and one that is not."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ragflash.bench.record import Measurement, Series, paired
from ragflash.engine.client import EngineClient
from ragflash.errors import EngineError
from ragflash.rag.answer import Answerer
from ragflash.rag.library import Library
from ragflash.rag.records import (
    DEFAULT_COLLECTION,
    Answer,
    AskMode,
    AskRequest,
    DocumentRecord,
    DuplicatePolicy,
    Scope,
)

_SCOPE = Scope(frozenset({DEFAULT_COLLECTION}))

Progress = Callable[[str, int, int], None]


def measure(
    library: Library,
    client: EngineClient,
    path: Path,
    question: str,
    runs: int,
    progress: Progress,
) -> Measurement:
    """Ask one question about a document again and again, which is forgotten every other time.

    Args:
        library: Empty; with an embedding model.
        client: The engine, which the library tells nothing.
        path: A document that fits the model's context.
        question: What is asked.
        runs: Pairs of readings, 7 or more.
        progress: Called with what is done, how far it is, and out of how much.

    Raises:
        ContextTooLong: The document does not fit the model's context.
        EngineError: The model wrote no answer whose first token could be timed.
    """
    progress("reading it into the library", 0, 0)
    add = partial(_add_anew, library, path)
    record = add()
    asker = _Asker(Answerer(library, client), client, add, record, question, 2 * runs + 1, progress)
    asker.ask()
    reused, cold = paired(asker.ask_again, asker.ask_cold, runs)
    info = client.info()
    return Measurement(
        series={
            "first_token_reused_ms": Series("ms", reused, against="first_token_cold_ms"),
            "first_token_cold_ms": Series("ms", cold),
            "answer_reused_ms": Series("ms", asker.reused_ms),
            "answer_cold_ms": Series("ms", asker.cold_ms),
            "read_tokens_per_s": Series("tokens/s", asker.read_rates),
        },
        threads=torch.get_num_threads(),
        parameters={
            "document": record.name,
            "sha256": record.sha256,
            "document_tokens": record.tokens,
            "document_pages": record.pages,
            "question": question,
            "prompt_tokens": asker.prompt_tokens,
            "reused_tokens": asker.reused_tokens,
            "weights": info.weights,
            "compute_dtype": info.compute_dtype,
            "kv_format": info.kv_format,
        },
        model={"file": info.model, "sha256": info.model_hash},
        embedder=library.health().embedding,
    )


def _add_anew(library: Library, path: Path) -> DocumentRecord:
    """Add the file as a document of its own, whatever was added before."""
    added = library.add(
        _SCOPE, DEFAULT_COLLECTION, path.name, path, on_duplicate=DuplicatePolicy.KEEP
    )
    library.wait(_SCOPE, added.job.id)
    return library.get(_SCOPE, added.document.id)


@dataclass
class _Asker:
    """Asks, and keeps what the readings of the first token do not say."""

    answerer: Answerer
    client: EngineClient
    add: Callable[[], DocumentRecord]
    record: DocumentRecord
    question: str
    total: int
    progress: Progress
    done: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    reused_ms: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)
    read_rates: list[float] = field(default_factory=list)

    def ask(self) -> Answer:
        self.progress("asking", self.done, self.total)
        request = AskRequest(self.question, (self.record.id,), AskMode.FULL)
        answer = asyncio.run(self.answerer.answer(_SCOPE, request))
        self.done += 1
        self.prompt_tokens = answer.usage.prompt_tokens
        return answer

    def ask_again(self) -> float:
        answer = self.ask()
        self.reused_tokens = answer.usage.cached_tokens
        self.reused_ms.append(answer.timings.total_ms)
        return _first_token_ms(answer)

    def ask_cold(self) -> float:
        # A source that was dropped is never kept again, so the next reading is of a new one.
        asyncio.run(self.client.drop_source(self.record.source_id))
        self.record = self.add()
        answer = self.ask()
        self.cold_ms.append(answer.timings.total_ms)
        if answer.timings.engine is not None:
            computed = answer.timings.engine
            self.read_rates.append(1000 * computed.prompt_n / computed.prompt_ms)
        return _first_token_ms(answer)


def _first_token_ms(answer: Answer) -> float:
    if answer.timings.ttft_ms is None:
        raise EngineError(f"the model wrote no answer to {answer.question!r}: nothing to time")
    return answer.timings.ttft_ms
