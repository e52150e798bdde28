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
from ragflash.engine.request import EngineInfo
from ragflash.engine.runner import Runner
from ragflash.engine.scheduler import Scheduler
from ragflash.engine.worker import Worker
from ragflash.errors import SettingInvalid
from ragflash.gguf.chat_template import ChatTemplate
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, pages_for
from ragflash.kvcache.grid import PageAllocators
from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.kvcache.tree import SegmentTree
from ragflash.models.contract import Model
from ragflash.models.registry import ComputeDtype, load_model
from ragflash.models.weights import WeightForm, weight_format
from ragflash.speculative.drafter import Drafter


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
    kv_bytes: int = 2 << 30,
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
        kv_bytes: On a CPU, memory for keys and values where no context is named.
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
    num_pages = _num_pages(loaded.model, context_tokens, kv_bytes, max_slots)
    info = _info(loaded, content_hash(model_path, cache_dir), num_pages, weights, where)
    core = _core(
        loaded,
        device=where,
        num_pages=num_pages,
        identity=_identity(loaded, info),
        max_slots=max_slots,
        chunk_tokens=prefill_chunk_tokens,
        drafter_factory=drafter_factory,
        draft_tokens=verify_rows - 1,
    )
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


def _core(
    loaded: _Loaded,
    *,
    device: torch.device,
    num_pages: int,
    identity: str,
    max_slots: int,
    chunk_tokens: int,
    drafter_factory: Callable[[], Drafter] | None,
    draft_tokens: int,
) -> EngineCore:
    model, tokenizer = loaded.model, loaded.tokenizer
    pages = KVPages(PagePool(model.kv_layout, num_pages, device))
    allocators = PageAllocators(PageAllocator(num_pages))
    store = SegmentTree(allocators)
    scheduler = Scheduler(
        allocators=allocators,
        store=store,
        identity=identity,
        max_slots=max_slots,
        chunk_tokens=chunk_tokens,
    )
    return EngineCore(
        runner=Runner(model, pages, vocab_size=tokenizer.vocab_size, device=device),
        scheduler=scheduler,
        store=store,
        identity=identity,
        vocabulary=Vocabulary.of(tokenizer),
        drafter_factory=drafter_factory,
        draft_tokens=draft_tokens,
    )


def _check(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise SettingInvalid(f"{name} = {value} must be at least 1")


def _num_pages(model: Model, context_tokens: int | None, kv_bytes: int, max_slots: int) -> int:
    page_bytes = model.kv_layout.page_bytes
    if context_tokens is not None:
        return pages_for(context_tokens)
    if page_bytes == 0:
        return pages_for(model.context_tokens) * max_slots
    if kv_bytes < page_bytes:
        raise SettingInvalid(
            f"{kv_bytes} bytes for keys and values hold no page of {PAGE_TOKENS} tokens; "
            f"this model needs {page_bytes} bytes for one"
        )
    return kv_bytes // page_bytes


def _info(
    loaded: _Loaded,
    model_hash: str,
    num_pages: int,
    weights: WeightForm,
    device: torch.device,
) -> EngineInfo:
    model = loaded.model
    return EngineInfo(
        model=loaded.file_name,
        model_hash=model_hash,
        architecture=loaded.architecture,
        weights=loaded.stored_as,
        compute_dtype=_name(model.compute_dtype) + ("+int4" if weights == "packed" else ""),
        kv_format=_name(model.kv_layout.dtype),
        context_tokens=min(model.context_tokens, num_pages * PAGE_TOKENS),
        device=str(device),
        template=loaded.template.origin,
    )


def _identity(loaded: _Loaded, info: EngineInfo) -> str:
    """Name all that keys and values depend on but tokens; another value never hits."""
    fields = (
        info.model_hash,
        hashlib.sha256(loaded.template.source.encode()).hexdigest(),
        loaded.tokenizer.fingerprint,
        info.compute_dtype,
        info.kv_format,
        str(PAGE_TOKENS),
    )
    return ":".join(fields)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
