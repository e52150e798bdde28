"""Speed of a model on a CPU, beside llama.cpp if that is installed, and the engine's memory."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from ragflash.bench import peer
from ragflash.bench.record import Measurement, Series, paired
from ragflash.engine.build import start_engine
from ragflash.engine.client import EngineClient
from ragflash.engine.request import ChatMessage, GenerateRequest, SegmentKind, TextSegment
from ragflash.errors import StorageError
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.kvcache.allocator import pages_for
from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.models.contract import ForwardBatch, Model, SequenceRows
from ragflash.models.registry import ComputeDtype, load_model
from ragflash.models.weights import WeightForm, weight_format

Forward = Callable[[Sequence[int], int], int]  # tokens, and how many are before them, to the next
Progress = Callable[[str, int, int], None]

_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a measurement.

    Attributes:
        prefill: Of the prompt whose reading is timed, all at once.
        decode: That are decoded, one by one.
        depth: That stand before those in the second measurement of decoding.
    """

    prefill: int = 512
    decode: int = 128
    depth: int = 2000

    @property
    def context(self) -> int:
        """Tokens that there must be room for."""
        return max(self.prefill, self.depth + self.decode)


def measure(
    path: Path,
    *,
    threads: int,
    pairs: int,
    progress: Progress,
    dtype: ComputeDtype = "auto",
    weights: WeightForm = "dense",
    sizes: Sizes | None = None,
) -> Measurement:
    """Measure a model file.

    Args:
        path: A model, as `GGUFFile.open` takes it.
        threads: Of both engines.
        pairs: Readings of each figure, 7 or more.
        progress: Called with what is done, how far it is, and out of how much.
        dtype: What the model computes in.
        weights: Whether 4-bit matrices stay packed.
        sizes: Tokens that are computed.

    Raises:
        ModelError: The file cannot be used.
    """
    sizes = sizes or Sizes()
    progress("filling a whole context", 0, 0)
    memory = measure_memory(path, threads, dtype, weights)
    torch.set_num_threads(threads)
    with GGUFFile.open(path) as file:
        model = load_model(file, dtype=dtype, weights=weights)
        first, stored_as = file.path, weight_format(file)
    ours = _Ours(model, sizes.context).forward
    parameters = {
        "stored_as": stored_as,
        "weights": weights,
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
        "prefill_tokens": sizes.prefill,
        "decode_tokens": sizes.decode,
        "depth_tokens": sizes.depth,
        "context_tokens": memory.context_tokens,
    }
    if peer.is_installed():
        other = peer.LlamaCpp(
            first, threads=threads, context_tokens=sizes.context, batch_tokens=sizes.prefill
        )
        with closing(other):
            parameters["peer"] = other.version
            series = measure_speed(ours, other.forward, sizes, pairs, progress)
    else:
        series = measure_speed(ours, None, sizes, pairs, progress)
    series["engine_rss_bytes"] = Series("bytes", [memory.rss_bytes])
    return Measurement(
        series=series,
        threads=threads,
        parameters=parameters,
        model={"file": first.name, "sha256": content_hash(path, None)},
    )


def measure_speed(
    ours: Forward, theirs: Forward | None, sizes: Sizes, pairs: int, progress: Progress
) -> dict[str, Series]:
    """Time prefill and decoding, ours alternating with theirs if there is another."""
    prompt = [1000 + token for token in range(sizes.prefill)]
    before = [1000 + token % 512 for token in range(sizes.depth)]
    timings: dict[str, Callable[[Forward], float]] = {
        "prefill": lambda forward: _prefill(forward, prompt),
        "decode": lambda forward: _decode(forward, 0, sizes.decode),
        "decode_deep": lambda forward: _decode(forward, sizes.depth, sizes.decode),
    }
    series = {}
    for number, (name, timing) in enumerate(timings.items()):
        progress(f"timing {name}", number, len(timings))
        for forward in (ours, theirs):
            if forward is not None and name == "decode_deep":
                for start in range(0, len(before), sizes.prefill):
                    forward(before[start : start + sizes.prefill], start)
            if forward is not None:
                timing(forward)  # for what is made at the first use
        if theirs is None:
            readings = [timing(ours) for _ in range(pairs)]
            series[name] = Series("tokens/s", readings)
            continue
        one, other = paired(lambda: timing(ours), lambda: timing(theirs), pairs)  # noqa: B023
        series[name] = Series("tokens/s", one, against=f"{name}_llama_cpp")
        series[f"{name}_llama_cpp"] = Series("tokens/s", other)
    progress("timing", len(timings), len(timings))
    return series


def _prefill(forward: Forward, prompt: Sequence[int]) -> float:
    started = time.perf_counter()
    forward(prompt, 0)
    return len(prompt) / (time.perf_counter() - started)


def _decode(forward: Forward, depth: int, count: int) -> float:
    started, token = time.perf_counter(), 1000
    for position in range(depth, depth + count):
        token = forward([token], position)
    return count / (time.perf_counter() - started)


class _Ours:
    """One sequence on a model and pages of its own."""

    def __init__(self, model: Model, num_tokens: int) -> None:
        self._model = model
        self._pages = KVPages(PagePool(model.kv_layout, pages_for(num_tokens)))

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], committed: int) -> int:
        count = len(token_ids)
        rows = SequenceRows(
            slot=0,
            num_rows=count,
            committed=committed,
            pages=tuple(range(pages_for(committed + count))),
            logit_rows=(count - 1,),
        )
        positions = torch.arange(committed, committed + count)
        batch = ForwardBatch(torch.tensor(token_ids), positions, (rows,))
        return int(self._model.forward(batch, self._pages).argmax())


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process that runs nothing but the engine holds, its whole context being filled.

    Attributes:
        rss_bytes: Resident memory, mapped files included.
        context_tokens: Tokens of the context.
    """

    rss_bytes: int
    context_tokens: int


def measure_memory(
    path: Path, threads: int, dtype: ComputeDtype = "auto", weights: WeightForm = "dense"
) -> Memory:
    """Start an engine in a process of its own, fill its context, and look."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_fill, path, threads, dtype, weights).result()


def _fill(path: Path, threads: int, dtype: ComputeDtype, weights: WeightForm) -> Memory:
    engine = start_engine(path, dtype=dtype, weights=weights, threads=threads, max_slots=1)
    with closing(engine) as client:
        limit = client.info().context_tokens
        fixed = client.count_tokens(_messages(""))
        per_word = (client.count_tokens(_messages(" the" * 64)) - fixed) / 64
        num_words = int((limit - fixed - _ANSWER_TOKENS) / per_word)
        asyncio.run(_answer(client, " the" * num_words))
        return Memory(_resident_bytes(), limit)


async def _answer(client: EngineClient, text: str) -> None:
    request = GenerateRequest("fill", _messages(text), max_tokens=_ANSWER_TOKENS, cache=False)
    await client.complete(request)


def _messages(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", (TextSegment(SegmentKind.DOCUMENT, text),)),)


def _resident_bytes() -> int:
    """Read `VmRSS` (proc(5)).

    Raises:
        StorageError: This system does not say.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise StorageError(f"the memory of a process cannot be read: {error}") from error
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
