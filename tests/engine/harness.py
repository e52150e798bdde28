"""A whole engine, worker thread included, around a toy model."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ragflash.engine.client import EngineClient
from ragflash.engine.core import EngineCore, Vocabulary
from ragflash.engine.file_tier import FileTier
from ragflash.engine.job import Job
from ragflash.engine.request import EngineInfo, Event, GenerateRequest, ScoreRequest
from ragflash.engine.runner import Runner
from ragflash.engine.scheduler import Scheduler
from ragflash.engine.worker import Worker
from ragflash.kvcache.allocator import PageAllocator, PageForm
from ragflash.kvcache.archive import SegmentArchive
from ragflash.kvcache.copies import Copies
from ragflash.kvcache.formats import KVFormatName
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.identity import Identity
from ragflash.kvcache.mover import DeviceMover, mover_of
from ragflash.kvcache.pages import KVPages, PackedPool, PagePool
from ragflash.kvcache.tree import SegmentTree
from ragflash.speculative.drafter import Draft
from tests.engine.toys import RawTemplate, StubDrafter

Propose = Callable[[Sequence[int], int], Sequence[int] | Draft]


@dataclass
class ToyEngine:
    client: EngineClient
    worker: Worker
    pages: KVPages
    core: EngineCore
    scheduler: Scheduler
    runner: Runner
    store: SegmentTree
    allocators: PageAllocators
    drafters: list[StubDrafter]

    def complete(self, request: GenerateRequest):
        return asyncio.run(self.client.complete(request))

    def complete_all(self, requests: Sequence[GenerateRequest]):
        async def gather():
            return await asyncio.gather(*map(self.client.complete, requests))

        return asyncio.run(gather())

    def submit(self, request: GenerateRequest | ScoreRequest) -> tuple[Job, list[Event]]:
        """Submit a request; its events are added to the list by the worker thread."""
        events: list[Event] = []
        job = self.client._prepare(request, events.append, 0.0)
        self.worker.submit(job)
        return job, events

    def events(self, request: GenerateRequest) -> list[Event]:
        async def collect():
            return [event async for event in self.client.generate(request)]

        return asyncio.run(collect())

    def assert_pages_are_accounted_for(self) -> None:
        """Nothing in flight: dropping all segments frees every page and every slot."""
        assert self.core.is_idle
        self.store.drop_all()
        assert self.allocators.num_free == self.allocators.num_pages


def make_pages(
    model, kv_format: KVFormatName, num_pages: int, num_packed_pages: int, grid_tokens: int
) -> tuple[KVPages, PageAllocators]:
    if placed := getattr(model, "placed", None):  # it keeps to its own
        return placed
    exact, numbers = PagePool(model.kv_layout, num_pages), PageAllocator(num_pages)
    if kv_format == "f16":
        return KVPages(exact), PageAllocators(numbers)
    return KVPages(exact, PackedPool(model.kv_layout, kv_format, num_packed_pages)), PageAllocators(
        numbers, PageAllocator(num_packed_pages, PageForm.PACKED), Grid(grid_tokens)
    )


def make_tier(
    archive: SegmentArchive | None,
    runner: Runner,
    store: SegmentTree,
    identity: Identity | None,
    pages: KVPages,
    copies: Copies | None,
) -> FileTier | None:
    if archive is None or identity is None:
        return None
    shapes = runner.state_shapes()
    if copies is None:
        return FileTier(archive, mover_of(pages, shapes), store, identity)
    return FileTier(archive, DeviceMover(pages, shapes, copies, num_slots=3), store, identity)


@contextmanager
def toy_engine(
    model,
    tokenizer,
    *,
    template=None,
    num_pages: int = 64,
    kv_format: KVFormatName = "f16",
    num_packed_pages: int = 64,
    grid_tokens: int = 512,
    max_slots: int = 4,
    max_in_flight: int = 64,
    chunk_tokens: int = 512,
    score_tokens: int | None = None,
    draft: Propose | None = None,
    draft_tokens: int = 15,
    gate: threading.Event | None = None,
    archive: SegmentArchive | None = None,
    identity: Identity | None = None,
    copies: Copies | None = None,
) -> Iterator[ToyEngine]:
    """Start an engine; its worker begins when `gate` is set. Format f16 is exact pages alone.

    With an `archive` it has an `identity` too; with `copies` pages move like those of a device.
    """
    pages, allocators = make_pages(model, kv_format, num_pages, num_packed_pages, grid_tokens)
    store = SegmentTree(allocators)
    runner = Runner(model, pages, vocab_size=tokenizer.vocab_size)
    files = make_tier(archive, runner, store, identity, pages, copies)
    name = identity.digest if identity else "toy"
    scheduler = Scheduler(
        allocators=allocators,
        store=store,
        identity=name,
        max_slots=max_slots,
        chunk_tokens=chunk_tokens,
        score_tokens=score_tokens,
        files=files,
    )
    drafters: list[StubDrafter] = []
    core = EngineCore(
        runner=runner,
        scheduler=scheduler,
        store=store,
        identity=name,
        vocabulary=Vocabulary.of(tokenizer),
        drafter_factory=remembering(draft, drafters) if draft is not None else None,
        draft_tokens=draft_tokens,
        files=files,
    )
    prepare = gate.wait if gate is not None else lambda: None
    worker = Worker(core, max_in_flight=max_in_flight, prepare=prepare)
    said = info(min(model.context_tokens, allocators.most_tokens))
    template = template or RawTemplate()
    client = EngineClient(worker, tokenizer=tokenizer, template=template, info=said)
    try:
        yield ToyEngine(client, worker, pages, core, scheduler, runner, store, allocators, drafters)
    finally:
        if gate is not None:
            gate.set()
        client.close()


def remembering(draft: Propose, drafters: list[StubDrafter]) -> Callable[[Job], StubDrafter]:
    def make(job: Job) -> StubDrafter:
        drafters.append(StubDrafter(draft))
        return drafters[-1]

    return make


def info(context_tokens: int) -> EngineInfo:
    return EngineInfo(
        model="toy",
        model_hash="toy",
        architecture="toy",
        weights="none",
        compute_dtype="float32",
        kv_format="float32",
        context_tokens=context_tokens,
        device="cpu",
    )
