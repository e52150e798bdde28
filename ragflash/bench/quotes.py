"""What it costs to bind a quote to long documents, token by token, without a model.

Quotes are written by drawing from the masks, which is the worst case: a model that knows what it
quotes leaves the places where many of them are possible after a token or two. Times are processor
time of the thread.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from ragflash.bench.record import LEAST_PAIRS, Measurement, Series
from ragflash.engine.constrain import ConstraintCompiler, Cursor
from ragflash.engine.constraint import Literal, QuoteFrom
from ragflash.engine.prompt import CompiledPrompt, TokenSegment, TokenSources
from ragflash.engine.request import SegmentKind
from ragflash.errors import DocumentUnreadable
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.gguf.tokenizer import Tokenizer
from ragflash_ingest.document import ParseError
from ragflash_ingest.pool import ParserPool

SOURCE_TOKENS = 138_696
_FORCED_TOKENS = 64

T = TypeVar("T")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: `runs` times so many quotes."""

    source_tokens: int = SOURCE_TOKENS
    quotes: int = 100
    runs: int = LEAST_PAIRS


def measure(
    documents: Sequence[Path], model: Path, sizes: Sizes, progress: Progress
) -> Measurement:
    """Quote from documents that are joined, and repeated or cut to the wanted length.

    Args:
        documents: What is quoted.
        model: Whose tokenizer is used.
        sizes: How much.
        progress: Called with what is done, how far it is, and out of how much.

    Raises:
        DocumentUnreadable: A file holds nothing to read.
    """
    with GGUFFile.open(model) as file:
        tokenizer = Tokenizer.from_gguf(file)
    token_bytes = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
    with ParserPool(1) as pool:
        prompt = _prompt("\n".join(_text(path, pool) for path in documents), tokenizer, sizes)
    constraint = (QuoteFrom(("source",)), Literal('"\n'))
    readings: dict[str, list[float]] = {}
    for run in range(sizes.runs):
        progress("quoting", run, sizes.runs)
        compiler = ConstraintCompiler(tokenizer, token_bytes)
        for name in ("first_prompt_ms", "same_prompt_ms"):
            ms, cursor = _time_ms(partial(compiler.compile, constraint, prompt))
            readings.setdefault(name, []).append(ms)
        ms, _ = _time_ms(cursor.mask)
        readings.setdefault("first_mask_ms", []).append(ms)
        masks: list[float] = []
        for seed in range(sizes.quotes):
            cursor = compiler.compile(constraint, prompt)
            _write(cursor, np.random.default_rng([run, seed]), masks)
        for name, share in (("median", 50), ("p99", 99), ("most", 100)):
            readings.setdefault(f"mask_{name}_ms", []).append(float(np.percentile(masks, share)))
    return Measurement(
        series={name: Series("ms", values) for name, values in readings.items()},
        threads=1,
        model={"file": model.name, "sha256": content_hash(model)},
        parameters={
            "documents": [path.name for path in documents],
            "source_tokens": len(prompt.token_ids),
            "quotes": sizes.quotes,
        },
    )


def _write(cursor: Cursor, draw: np.random.Generator, masks: list[float]) -> None:
    """Draw a quote to its closing mark; adds what each mask took, in ms."""
    while not cursor.is_done:
        ms, mask = _time_ms(cursor.mask)
        masks.append(ms)
        cursor.advance((int(draw.choice(mask.ids)),))
        cursor.advance(cursor.forced(_FORCED_TOKENS))


def _prompt(text: str, tokenizer: Tokenizer, sizes: Sizes) -> CompiledPrompt:
    ids, starts = tokenizer.encode_with_offsets(text)
    while len(ids) < sizes.source_tokens:
        text += "\n" + text
        ids, starts = tokenizer.encode_with_offsets(text)
    start = np.asarray(starts, dtype=np.int64)[: sizes.source_tokens]
    end = np.append(start[1:], starts[len(start)] if len(starts) > len(start) else len(text))
    none = np.zeros(len(start), dtype=np.int64)
    segment = TokenSegment(SegmentKind.DOCUMENT, tuple(ids[: len(start)]), frozenset({"source"}))
    return CompiledPrompt((segment,), ("source",), TokenSources(none, start, end, none))


def _text(path: Path, pool: ParserPool) -> str:
    try:
        return pool.parse(path.read_bytes(), path.name).text
    except ParseError as error:
        raise DocumentUnreadable(error.reason, f"{path.name}: {error.detail}") from error


def _time_ms(run: Callable[[], T]) -> tuple[float, T]:
    started = time.thread_time()
    value = run()
    return 1000 * (time.thread_time() - started), value
