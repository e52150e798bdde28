"""Puts an engine together from a model file."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ragflash.engine.client import EngineClient
from ragflash.engine.core import EngineCore, Vocabulary
from ragflash.engine.request import EngineInfo
from ragflash.engine.runner import Runner
from ragflash.engine.scheduler import Scheduler
from ragflash.engine.worker import Worker
from ragflash.errors import SettingInvalid
from ragflash.gguf.chat_template import ChatTemplate
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, pages_for
from ragflash.kvcache.pages import PagePool
from ragflash.kvcache.tree import SegmentTree
from ragflash.models.contract import Model
from ragflash.models.registry import ComputeDtype, WeightForm, load_model
from ragflash.models.weights import weight_format
from ragflash.speculative.drafter import Drafter


def start_engine(
    model_path: Path,
    *,
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
    draft_tokens: int = 15,
) -> EngineClient:
    """Load a model and start its worker; blocks until the model is loaded.

    Args:
        model_path: A model, as `GGUFFile.open` takes it.
        dtype: What the model computes in.
        weights: Whether 4-bit matrices are unpacked, or stay packed and are multiplied coarsely.
        pre_tokenizer: In place of the file's.
        kv_bytes: Memory for keys and values of sequences and stored segments.
        max_slots: Requests that run together.
        queue_size: Requests that may wait beyond those.
        prefill_chunk_tokens: Most prompt tokens of a request in one step.
        threads: Compute threads; `None` leaves the choice to torch.
        cache_dir: Remembers the model file's hash.
        drafter_factory: Makes the drafter of one request; `None` decodes plainly.
        draft_tokens: Most drafted tokens of a request in one step.

    Raises:
        ModelError: The file cannot be used.
        SettingInvalid: A size is not positive or too small for the model, or a name not known.
    """
    _check(
        threads=1 if threads is None else threads,
        max_slots=max_slots,
        prefill_chunk_tokens=prefill_chunk_tokens,
    )
    with GGUFFile.open(model_path) as file:
        tokenizer = Tokenizer.from_gguf(file, pre_tokenizer=pre_tokenizer)
        template = ChatTemplate.from_gguf(file, tokenizer)
        model = load_model(file, dtype=dtype, weights=weights)
        num_pages = _num_pages(model, kv_bytes, max_slots)
        info = _info(file, model, template, content_hash(model_path, cache_dir), num_pages, weights)
    core = _core(
        model,
        tokenizer,
        num_pages=num_pages,
        identity=_identity(template, tokenizer, info),
        max_slots=max_slots,
        chunk_tokens=prefill_chunk_tokens,
        drafter_factory=drafter_factory,
        draft_tokens=draft_tokens,
    )
    # OpenMP keeps the number of threads per calling thread, so the worker must set its own.
    prepare = partial(torch.set_num_threads, threads or torch.get_num_threads())
    worker = Worker(core, max_in_flight=max_slots + queue_size, prepare=prepare)
    return EngineClient(worker, tokenizer=tokenizer, template=template, info=info)


def _core(
    model: Model,
    tokenizer: Tokenizer,
    *,
    num_pages: int,
    identity: str,
    max_slots: int,
    chunk_tokens: int,
    drafter_factory: Callable[[], Drafter] | None,
    draft_tokens: int,
) -> EngineCore:
    pool = PagePool(model.kv_layout, num_pages)
    allocator = PageAllocator(num_pages)
    store = SegmentTree(allocator)
    scheduler = Scheduler(
        allocator=allocator,
        store=store,
        identity=identity,
        max_slots=max_slots,
        chunk_tokens=chunk_tokens,
    )
    return EngineCore(
        runner=Runner(model, pool, vocab_size=tokenizer.vocab_size),
        scheduler=scheduler,
        store=store,
        identity=identity,
        vocabulary=Vocabulary.of(tokenizer),
        drafter_factory=drafter_factory,
        draft_tokens=draft_tokens,
    )


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise SettingInvalid(f"{name} = {value} must be at least 1")


def _num_pages(model: Model, kv_bytes: int, max_slots: int) -> int:
    page_bytes = model.kv_layout.page_bytes
    if page_bytes == 0:
        return pages_for(model.context_tokens) * max_slots
    if kv_bytes < page_bytes:
        raise SettingInvalid(
            f"{kv_bytes} bytes for keys and values hold no page of {PAGE_TOKENS} tokens; "
            f"this model needs {page_bytes} bytes for one"
        )
    return kv_bytes // page_bytes


def _info(
    file: GGUFFile,
    model: Model,
    template: ChatTemplate,
    model_hash: str,
    num_pages: int,
    weights: WeightForm,
) -> EngineInfo:
    return EngineInfo(
        model=file.path.name,
        model_hash=model_hash,
        architecture=file.require("general.architecture", str),
        weights=weight_format(file),
        compute_dtype=_name(model.compute_dtype) + ("+int4" if weights == "packed" else ""),
        kv_format=_name(model.kv_layout.dtype),
        context_tokens=min(model.context_tokens, num_pages * PAGE_TOKENS),
        device="cpu",
        template=template.origin,
    )


def _identity(template: ChatTemplate, tokenizer: Tokenizer, info: EngineInfo) -> str:
    """Name all that keys and values depend on but tokens; another value never hits."""
    fields = (
        info.model_hash,
        hashlib.sha256(template.source.encode()).hexdigest(),
        tokenizer.fingerprint,
        info.compute_dtype,
        info.kv_format,
        str(PAGE_TOKENS),
    )
    return ":".join(fields)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
