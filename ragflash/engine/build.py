"""Puts an engine together from a model file."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ragflash.engine.client import EngineClient
from ragflash.engine.core import EngineCore, Vocabulary
from ragflash.engine.device import DeviceChoice, choose_device
from ragflash.engine.host import HostOptions, KVFormatChoice, host_pages
from ragflash.engine.request import EngineInfo
from ragflash.engine.runner import Runner
from ragflash.engine.scheduler import Scheduler
from ragflash.engine.worker import Worker
from ragflash.errors import SettingInvalid
from ragflash.gguf.chat_template import ChatTemplate
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.kvcache.grid import PageAllocators
from ragflash.kvcache.pages import KVPages
from ragflash.kvcache.planner import GRID_TOKENS
from ragflash.kvcache.tree import SegmentTree
from ragflash.models.contract import Model
from ragflash.models.registry import ComputeDtype, load_model
from ragflash.models.weights import WeightForm, weight_format
from ragflash.speculative.drafter import Drafter
from ragflash_kernels.kv_codec import ROTATION_VERSION


def start_engine(
    model_path: Path,
    *,
    device: DeviceChoice = "auto",
    vram_bytes: int | None = None,
    context_tokens: int | None = None,
    verify_rows: int = 21,
    dtype: ComputeDtype = "auto",
    weights: WeightForm = "dense",
    pre_tokenizer: str | None = None,
    kv_format: KVFormatChoice = "auto",
    kv_bytes: int = 2 << 30,
    grid_tokens: int = GRID_TOKENS,
    max_slots: int = 4,
    queue_size: int = 64,
    prefill_chunk_tokens: int = 512,
    threads: int | None = None,
    cache_dir: Path | None = None,
    drafter_factory: Callable[[], Drafter] | None = None,
) -> EngineClient:
    """Load a model and start its worker; blocks until the model is loaded.

    Args:
        model_path: A model, as `GGUFFile.open` takes it.
        device: Where it runs; `auto` is the first card that can be used, else the CPU.
        vram_bytes: Of the card's memory, at most that much; `None` takes what is free.
        context_tokens: That sequences and stored segments share; `None` takes what fits.
        verify_rows: Most rows of a request in one step, drafted ones included.
        dtype: What the model computes in.
        weights: Whether 4-bit matrices are unpacked, or stay packed and are multiplied coarsely.
        pre_tokenizer: In place of the file's.
        kv_format: Of keys and values beyond the newest; `auto` keeps all exact on a CPU.
        kv_bytes: On a CPU, memory for keys and values where no context is named.
        grid_tokens: Decides which keys and values are the newest, see `kvcache.grid`.
        max_slots: Requests that run together.
        queue_size: Requests that may wait beyond those.
        prefill_chunk_tokens: Most prompt tokens of a request in one step.
        threads: Compute threads; `None` leaves the choice to torch.
        cache_dir: Remembers the model file's hash.
        drafter_factory: Makes the drafter of one request; `None` decodes plainly.

    Raises:
        ModelError: The file cannot be used.
        DeviceError: The card cannot be used as it was asked to be.
        SettingInvalid: A size is not positive or too small for the model, or a name not known.
    """
    _check(threads=threads, max_slots=max_slots, prefill_chunk_tokens=prefill_chunk_tokens)
    _check(context_tokens=context_tokens, verify_rows=verify_rows)
    where = choose_device(device)
    loaded = _load(model_path, where, dtype, weights, pre_tokenizer)
    options = HostOptions(kv_format, grid_tokens, context_tokens, kv_bytes, max_slots)
    pages, allocators = host_pages(loaded.model, options, where)
    info = _info(loaded, content_hash(model_path, cache_dir), pages, allocators, weights, where)
    turns = _Turns(max_slots, prefill_chunk_tokens, drafter_factory, verify_rows - 1)
    core = _core(loaded, pages, allocators, info, turns)
    worker = _start_worker(core, max_slots + queue_size, threads or torch.get_num_threads())
    return EngineClient(worker, tokenizer=loaded.tokenizer, template=loaded.template, info=info)


def _start_worker(core: EngineCore, max_in_flight: int, threads: int) -> Worker:
    # OpenMP keeps the number of threads per calling thread, so the worker must set its own.
    prepare = partial(torch.set_num_threads, threads)
    return Worker(core, max_in_flight=max_in_flight, prepare=prepare)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a model file gives."""

    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate
    file_name: str
    architecture: str
    stored_as: str


def _load(
    path: Path,
    device: torch.device,
    dtype: ComputeDtype,
    weights: WeightForm,
    pre_tokenizer: str | None,
) -> _Loaded:
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file, pre_tokenizer=pre_tokenizer)
        return _Loaded(
            model=load_model(file, dtype=dtype, weights=weights, device=device),
            tokenizer=tokenizer,
            template=ChatTemplate.from_gguf(file, tokenizer),
            file_name=file.path.name,
            architecture=file.require("general.architecture", str),
            stored_as=weight_format(file),
        )


@dataclass(frozen=True, slots=True)
class _Turns:
    """What a step may hold; see `start_engine`."""

    max_slots: int
    chunk_tokens: int
    drafter_factory: Callable[[], Drafter] | None
    draft_tokens: int


def _core(
    loaded: _Loaded, pages: KVPages, allocators: PageAllocators, info: EngineInfo, turns: _Turns
) -> EngineCore:
    model, vocab_size = loaded.model, loaded.tokenizer.vocab_size
    identity = _identity(loaded, info, pages, allocators)
    store = SegmentTree(allocators)
    scheduler = Scheduler(
        allocators=allocators,
        store=store,
        identity=identity,
        max_slots=turns.max_slots,
        chunk_tokens=turns.chunk_tokens,
    )
    return EngineCore(
        runner=Runner(model, pages, vocab_size=vocab_size, device=info.device),
        scheduler=scheduler,
        store=store,
        identity=identity,
        vocabulary=Vocabulary.of(loaded.tokenizer),
        drafter_factory=turns.drafter_factory,
        draft_tokens=turns.draft_tokens,
    )


def _check(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise SettingInvalid(f"{name} = {value} must be at least 1")


def _info(
    loaded: _Loaded,
    model_hash: str,
    pages: KVPages,
    allocators: PageAllocators,
    weights: WeightForm,
    device: torch.device,
) -> EngineInfo:
    model, packed = loaded.model, pages.packed
    return EngineInfo(
        model=loaded.file_name,
        model_hash=model_hash,
        architecture=loaded.architecture,
        weights=loaded.stored_as,
        compute_dtype=_name(model.compute_dtype) + ("+int4" if weights == "packed" else ""),
        kv_format=_name(pages.exact.layout.dtype) if packed is None else packed.kv_format,
        context_tokens=min(model.context_tokens, allocators.most_tokens),
        device=str(device),
        template=loaded.template.origin,
    )


def _identity(loaded: _Loaded, info: EngineInfo, pages: KVPages, allocators: PageAllocators) -> str:
    """Name all that keys and values depend on but tokens; another value never hits."""
    fields = (
        info.model_hash,
        hashlib.sha256(loaded.template.source.encode()).hexdigest(),
        loaded.tokenizer.fingerprint,
        info.compute_dtype,
        _name(pages.exact.layout.dtype),
        str(PAGE_TOKENS),
        *_packing(pages, allocators),
    )
    return ":".join(fields)


def _packing(pages: KVPages, allocators: PageAllocators) -> tuple[str, ...]:
    """Name what decides about packed pages, and what is in them."""
    if pages.packed is None or allocators.grid is None:
        return ()
    return pages.packed.kv_format, str(ROTATION_VERSION), str(allocators.grid.tokens)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
