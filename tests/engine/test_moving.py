"""Pages of a device come and go while it computes: late copies change no answer."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch

from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.request import Event, Failed
from ragflash.kvcache.copies import Wait
from ragflash.sessions import FolderArchive
from tests.engine.harness import ToyEngine, toy_engine
from tests.engine.test_file_tier import (
    TOKENIZER,
    HeldDisk,
    answer,
    asked,
    engine_of,
    open_archive,
)
from tests.engine.test_two_forms import ReaderModel
from tests.kvcache.late_copies import LateCopies
from tests.sessions.samples import IDENTITY, files_of, flip

LENGTHS = {"exact": (250, 300, 810), "packed": (505, 1018, 1700), "recurrent": (1, 700)}


def device_engine(
    archive: FolderArchive, copies: LateCopies, **options: object
) -> AbstractContextManager[ToyEngine]:
    options |= {"archive": archive, "identity": IDENTITY, "copies": copies}
    return toy_engine(ReaderModel(), TOKENIZER, **options)


def assert_nothing_is_held(engine: ToyEngine) -> None:
    engine.store.make_room(lambda: None)
    engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("name", LENGTHS)
def test_a_device_answers_from_files_as_computing_does(name, tmp_path):
    lengths = LENGTHS[name]
    with engine_of(name) as engine:
        cold = {length: answer(engine, asked(length, cache=False)) for length in lengths}
    with engine_of(name, tmp_path, copies=LateCopies()) as engine:
        for length in lengths:
            answer(engine, asked(length, "first?"))
    with engine_of(name, tmp_path, copies=LateCopies()) as engine:
        for length in lengths:
            warm = answer(engine, asked(length))
            assert warm.token_ids == cold[length].token_ids
            assert warm.tier is CacheTier.FILE
            assert warm.usage.cached_tokens == 6 + length
        assert_nothing_is_held(engine)


def test_damage_at_the_end_of_a_file_leaves_nothing_on_a_device(tmp_path):
    with engine_of("packed", tmp_path, copies=LateCopies()) as engine:
        cold = answer(engine, asked(1700))
    largest = max(files_of(tmp_path), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size - 4096 - 5000, 3)
    with engine_of("packed", tmp_path, copies=LateCopies()) as engine:
        missed = answer(engine, asked(1700))
        assert missed.token_ids == cold.token_ids
        assert (missed.tier, missed.miss_reason) == (CacheTier.NONE, CacheMiss.DAMAGED)
        assert_nothing_is_held(engine)


def test_whoever_gives_up_between_two_pages_leaves_nothing_on_a_device(tmp_path):
    disk = HeldDisk()
    disk.may_create.set()
    options = {"kv_format": "tq3_0", "num_pages": 128, "num_packed_pages": 128}
    with (
        open_archive(tmp_path, disk=disk) as archive,
        device_engine(archive, LateCopies(), **options) as engine,
    ):
        cold = answer(engine, asked(1700))
        archive.flush()
        engine.store.drop_all()
        jobs, num_reads = [], iter(range(1000))

        def give_up() -> None:
            if next(num_reads) == 12:
                jobs[0].cancelled.set()

        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        jobs.append(engine.client._prepare(asked(1700), events.put, 0.0))
        disk.on_read = give_up
        engine.worker.submit(jobs[0])
        while not isinstance(events.get(timeout=30), Failed):
            pass
        warm = answer(engine, asked(1700))
        assert (warm.tier, warm.token_ids) == (CacheTier.FILE, cold.token_ids)
        assert_nothing_is_held(engine)


class GatedCopies(LateCopies):
    """Copies begin when the gate is open, at the latest at the end of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        self.gate.wait()
        return super().start(source, target)

    def __enter__(self) -> "GatedCopies":
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()


@pytest.mark.parametrize("name", ["exact", "packed"])
def test_pages_that_are_being_saved_are_not_used_for_another_document(name, tmp_path):
    copies = GatedCopies()
    with engine_of(name, tmp_path, copies=copies) as engine, copies:
        cold = answer(engine, asked(1700))
        engine.store.drop_all()
        assert engine.allocators.num_free < engine.allocators.num_pages
        answer(engine, asked(1650, cache=False))
    with engine_of(name, tmp_path) as engine:
        warm = answer(engine, asked(1700))
        assert (warm.tier, warm.token_ids) == (CacheTier.FILE, cold.token_ids)


def test_a_prompt_that_needs_every_page_waits_for_those_that_are_being_saved(tmp_path):
    copies = GatedCopies()
    with (
        open_archive(tmp_path) as archive,
        device_engine(archive, copies, num_pages=6) as engine,
        copies,
        ThreadPoolExecutor(1) as thread,
    ):
        cold = answer(engine, asked(600))
        waiting = thread.submit(answer, engine, asked(900))
        copies.gate.set()
        assert waiting.result(timeout=30).usage.cached_tokens == 6
        archive.flush()
        warm = answer(engine, asked(600))
        assert (warm.tier, warm.token_ids) == (CacheTier.FILE, cold.token_ids)
        assert_nothing_is_held(engine)
