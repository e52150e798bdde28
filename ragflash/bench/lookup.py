"""How fast drafts are looked up in a long document, and how much of what is written they foresee.

What a model would write is made of the document's own text and of another text, so that the figures
depend on nothing but the documents: passages that are quoted with other words between them, a
passage that is edited as it is copied, and text that has nothing to do with the document. What a
proposal takes is processor time of its thread.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from ragflash.bench.record import LEAST_PAIRS, Measurement, Series
from ragflash.errors import DocumentUnreadable
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.speculative.drafter import Draft
from ragflash.speculative.lookup import LookupDrafter, Match, SourceIndex
from ragflash_ingest.document import ParseError
from ragflash_ingest.pool import ParserPool

SOURCE_TOKENS = 138_696
TEXT_TOKENS = 1500

_BUDGET = 20
_QUOTE_TOKENS = (20, 120)
_BETWEEN_TOKENS = (8, 30)
_EDIT_EVERY = (12, 40)
_MOST_COMPARED = 64

Progress = Callable[[str, int, int], None]
Run = Sequence[int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; `runs` texts of each kind, and indexes built."""

    source_tokens: int = SOURCE_TOKENS
    text_tokens: int = TEXT_TOKENS
    runs: int = LEAST_PAIRS


def measure(
    documents: Sequence[Path], other: Path, model: Path, sizes: Sizes, progress: Progress
) -> Measurement:
    """Index documents as one, and draft what is written about them.

    Args:
        documents: Joined, and repeated or cut to the wanted length.
        other: A text that is none of them.
        model: Whose tokenizer is used.
        sizes: How much.
        progress: Called with what is done, how far it is, and out of how much.

    Raises:
        DocumentUnreadable: A file holds nothing to read.
    """
    with GGUFFile.open(model) as file:
        tokenizer = Tokenizer.from_gguf(file)
    with ParserPool(1) as pool:
        read = [_tokens(path, pool, tokenizer) for path in documents]
        free = _tokens(other, pool, tokenizer)
    joined = [token_id for one in read for token_id in one]
    source = np.resize(np.asarray(joined), sizes.source_tokens).tolist()
    build_s, index = [], SourceIndex.build(source)
    for run in range(sizes.runs):
        progress("building", run, sizes.runs)
        build_s.append(_time_s(lambda: SourceIndex.build(source)))
    series = {
        "build_s": Series("s", build_s),
        "load_s": Series("s", [_time_s(lambda: SourceIndex(index.block)) for _ in build_s]),
        "bytes_per_token": Series("bytes", [len(index.block) / len(index)]),
    }
    times: dict[str, list[float]] = {}
    for kind, write in _KINDS.items():
        runs = []
        for seed in range(sizes.runs):
            progress(f"drafting {kind}", seed, sizes.runs)
            text = list(write(source, free, sizes.text_tokens, random.Random(seed)))
            runs.append(_draft(index, source, text[: sizes.text_tokens]))
        series |= _series_of(kind, runs)
        for name, us in (reading for run in runs for reading in run.readings):
            times.setdefault(f"propose_{name}_us", []).append(us)
    return Measurement(
        series=series | {name: Series("us", values) for name, values in sorted(times.items())},
        threads=1,
        model={"file": model.name, "sha256": content_hash(model)},
        parameters={
            "documents": [path.name for path in documents],
            "other": other.name,
            "sha256": sha256(np.asarray(source, "<u4").tobytes()).hexdigest(),
            "source_tokens": len(source),
            "distinct_tokens": min(len(joined), len(source)),
            "text_tokens": sizes.text_tokens,
            "budget": _BUDGET,
        },
    )


@dataclass(frozen=True, slots=True)
class _Drafted:
    """How a text was drafted: class of match and processor time of each proposal, and tokens."""

    readings: Sequence[tuple[str, float]]
    num_tokens: int


def _series_of(kind: str, runs: Sequence[_Drafted]) -> dict[str, Series]:
    in_order = [sorted(us for _, us in run.readings) for run in runs]
    return {
        f"{kind}_tokens_per_step": Series(
            "tokens", [run.num_tokens / len(run.readings) for run in runs]
        ),
        f"{kind}_propose_median_us": Series("us", [us[len(us) // 2] for us in in_order]),
        f"{kind}_propose_p99_us": Series("us", [us[99 * len(us) // 100] for us in in_order]),
    }


def _draft(index: SourceIndex, source: Run, text: Run) -> _Drafted:
    """Write a text behind a prompt of the source, as a model would that is sure of every token."""
    drafter = LookupDrafter([index], source, written_from=len(source))
    history, written, readings = [*source, text[0]], 1, []
    while written < len(text):
        started = time.thread_time()
        draft = drafter.propose(history, _BUDGET)
        us = round(1e6 * (time.thread_time() - started), 1)
        readings.append((_class_of(drafter.match), us))
        num_new = min(_num_foreseen(draft, text[written:]) + 1, len(text) - written)
        history += text[written : written + num_new]
        written += num_new
    return _Drafted(readings, len(text) - 1)


def _num_foreseen(draft: Draft, text: Run) -> int:
    children, at = draft.children(), -1
    for count, token_id in enumerate(text):
        following = children.get((at, token_id))
        if following is None:
            return count
        at = following
    return len(text)


def _class_of(match: Match | None) -> str:
    if match is None:
        return "none"
    if match.source != "lookup":
        return "output"
    if match.length > _MOST_COMPARED:
        return "copy"
    return "long" if match.length >= 13 else "middle" if match.length >= 8 else "short"


def _quoted(source: Run, free: Run, num_tokens: int, draw: random.Random) -> Iterator[int]:
    written, at = 0, draw.randrange(len(free))
    while written < num_tokens:
        between, quote = draw.randint(*_BETWEEN_TOKENS), draw.randint(*_QUOTE_TOKENS)
        start = draw.randrange(len(source) - quote)
        yield from (free[(at + step) % len(free)] for step in range(between))
        yield from source[start : start + quote]
        at, written = at + between, written + between + quote


def _edited(source: Run, free: Run, num_tokens: int, draw: random.Random) -> Iterator[int]:
    """Leave out, put in, or replace some words every few dozen."""
    at = draw.randrange(len(source) - 2 * num_tokens)
    written = 0
    while written < num_tokens:
        kept = draw.randint(*_EDIT_EVERY)
        yield from source[at : at + kept]
        put, left_out = draw.choice([(0, 3), (3, 0), (1, 1), (2, 2)])
        start = draw.randrange(len(free) - put)
        yield from free[start : start + put]
        at, written = at + kept + left_out, written + kept + put


def _freely(_: Run, free: Run, num_tokens: int, draw: random.Random) -> Iterator[int]:
    start = draw.randrange(len(free))
    return (free[(start + step) % len(free)] for step in range(num_tokens))


_KINDS: dict[str, Callable[[Run, Run, int, random.Random], Iterator[int]]] = {
    "quote": _quoted,
    "edit": _edited,
    "free": _freely,
}


def _tokens(path: Path, pool: ParserPool, tokenizer: Tokenizer) -> Run:
    try:
        document = pool.parse(path.read_bytes(), path.name)
    except ParseError as error:
        raise DocumentUnreadable(error.reason, f"{path.name}: {error.detail}") from error
    return tokenizer.encode(document.text)


def _time_s(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
