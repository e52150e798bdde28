"""What is read from files answers as if it were computed, and a file that is wrong costs no more.

Toys predict from every bit that they read, so a wrong page, place, form or state is a wrong token.
Each test of reuse counts rows: what came from a file was not computed.
"""

import dataclasses
import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import (
    ChatMessage,
    DraftMode,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.kvcache.identity import Identity
from ragflash.sessions import FolderArchive, SessionFolder, SessionLimits
from ragflash.sessions.disk import Disk
from tests.engine.harness import ToyEngine, toy_engine
from tests.engine.test_reuse import mark_reader
from tests.engine.test_two_forms import ReaderModel, text_of
from tests.engine.toys import (
    ToyRecurrentModel,
    TurnTemplate,
    ask,
    byte_tokenizer,
    document,
)
from tests.sessions.samples import IDENTITY, LIMITS, files_of, flip
from tests.sessions.test_faults import FaultyDisk

TOKENIZER = byte_tokenizer()
RULES = TextSegment(SegmentKind.RULES, "rules;")
# Pages of one form, pages of two in blocks of 512 tokens, and a state without pages.
CLASSES = {
    "exact": (ReaderModel, {"kv_format": "f16"}),
    "packed": (ReaderModel, {"kv_format": "tq3_0", "num_packed_pages": 128}),
    "recurrent": (lambda: ToyRecurrentModel(vocab_size=TOKENIZER.vocab_size), {}),
}


@contextmanager
def open_archive(
    path: Path, limits: SessionLimits = LIMITS, disk: Disk | None = None, **options: int
) -> Iterator[FolderArchive]:
    folder = SessionFolder.open(path, limits, disk=disk)
    archive = FolderArchive(folder, **options)
    try:
        yield archive
    finally:
        archive.close()
        folder.close()


@contextmanager
def engine_of(
    name: str,
    path: Path | None = None,
    *,
    identity: Identity = IDENTITY,
    limits: SessionLimits = LIMITS,
    disk: Disk | None = None,
    **options,
) -> Iterator[ToyEngine]:
    """Start a new engine; with a path, over the folder there."""
    make, defaults = CLASSES[name]
    options = {"num_pages": 128, **defaults, **options}
    if path is None:
        with toy_engine(make(), TOKENIZER, **options) as engine:
            yield engine
        return
    with open_archive(path, limits, disk) as archive:
        options |= {"archive": archive, "identity": identity}
        with toy_engine(make(), TOKENIZER, **options) as engine:
            yield engine


def answer(engine: ToyEngine, request: GenerateRequest) -> Finished:
    """Complete a request; its rows are those of the tokens that were not cached."""
    before = engine.runner.num_rows
    finished = engine.complete(request)
    num_rows = engine.runner.num_rows - before
    assert num_rows == finished.timings.forward_rows
    assert num_rows >= finished.usage.prompt_tokens - finished.usage.cached_tokens
    if finished.timings.draft_n == 0:
        computed = finished.usage.prompt_tokens - finished.usage.cached_tokens
        assert num_rows == computed + max(0, len(finished.token_ids) - 1)
    return finished


def asked(length: int, question: str = "what?", **options) -> GenerateRequest:
    options = {"max_tokens": 6, "name": question, **options}
    return ask(question, RULES, document(text_of(length), "d"), **options)


SWEEPS = {
    "exact": (1, 249, 250, 251, *range(300, 811, 19)),
    "packed": (249, 250, 251, 505, 506, 1017, 1018, 1019, *range(700, 1800, 41)),
    "recurrent": (1, 250, 700),
}


@pytest.mark.parametrize("name", CLASSES)
def test_after_a_restart_files_answer_as_computing_does(name, tmp_path):
    lengths = SWEEPS[name]
    with engine_of(name) as engine:
        cold = {length: answer(engine, asked(length, cache=False)) for length in lengths}
    with engine_of(name, tmp_path) as engine:
        for length in lengths:
            assert answer(engine, asked(length, "first?")).tier is not CacheTier.FILE
    with engine_of(name, tmp_path) as engine:
        for at, length in enumerate(lengths):
            warm = answer(engine, asked(length))
            assert warm.token_ids == cold[length].token_ids
            assert warm.tier is CacheTier.FILE
            assert warm.usage.cached_tokens == len(RULES.text) + length
            assert warm.miss_reason is None
            assert warm.timings.restore_ms > 0
            assert engine.store.num_evicted or len(engine.store) == at + 2
        engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_evicted_from_memory_comes_back_with_drafts_as_without(name, tmp_path):
    lengths = (250, 700, 1530, 1790)
    with engine_of(name) as engine:
        cold = {length: answer(engine, asked(length, cache=False)) for length in lengths}

    def draft(history: Sequence[int], budget: int) -> list[int]:
        """Know the answer, but err at every third token."""
        length = next(n for n in lengths if len(history) - n - 11 in range(6))
        rest = cold[length].token_ids[len(history) - length - 11 :][:budget]
        return [97 if (len(history) + i) % 3 == 0 else token for i, token in enumerate(rest)]

    for options in ({}, {"draft": draft}):
        with engine_of(name, tmp_path / str(len(options)), **options) as engine:
            for length in lengths:
                answer(engine, asked(length, "first?", draft=DraftMode.OFF))
            for length in lengths * 2:
                engine.store.evict(engine.allocators.num_pages)
                engine.store.drop_all()
                warm = answer(engine, asked(length))
                assert warm.token_ids == cold[length].token_ids
                assert warm.tier is CacheTier.FILE
                assert warm.usage.cached_tokens == len(RULES.text) + length
                assert bool(warm.timings.draft_n) == bool(options)
            engine.assert_pages_are_accounted_for()


def turns(*texts: str) -> GenerateRequest:
    messages = [ChatMessage("user", (RULES, document(text_of(800), "d"), conversation("hello")))]
    for at, text in enumerate(texts):
        messages.append(ChatMessage("user" if at % 2 else "assistant", (conversation(text),)))
    return GenerateRequest("c", tuple(messages), max_tokens=4)


def conversation(text: str) -> TextSegment:
    return TextSegment(SegmentKind.CONVERSATION, text)


@pytest.mark.parametrize("name", CLASSES)
def test_turns_extend_what_memory_has_from_files(name, tmp_path):
    """Turn after turn is a file; memory has the first ones, files the rest."""
    steps = [turns(), turns("so", "go on"), turns("so", "go on" * 100, "well", "and then?")]
    options = {"template": TurnTemplate()}
    cold = []
    for request in steps:
        with engine_of(name, **options) as engine:
            cold.append(answer(engine, request))
    with engine_of(name, tmp_path, **options) as engine:
        assert [answer(engine, request).token_ids for request in steps] == [
            finished.token_ids for finished in cold
        ]
    computed = compile_prompt(steps[2].messages, TurnTemplate(), TOKENIZER).segments[-1].token_ids
    for first in range(3):
        with engine_of(name, tmp_path, **options) as engine:
            for at, request in enumerate((steps[first], steps[2])):
                warm = answer(engine, request)
                assert warm.token_ids == cold[(first, 2)[at]].token_ids
                assert warm.tier is (CacheTier.DEVICE if first == 2 and at else CacheTier.FILE)
                assert warm.miss_reason is None
                assert warm.timings.prompt_n == len(computed)
            engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Identity)])
def test_another_identity_misses_and_names_the_field(field, tmp_path):
    with engine_of("recurrent", tmp_path) as engine:
        cold = answer(engine, asked(100))
    value = getattr(IDENTITY, field)
    other = value + 1 if isinstance(value, int) else f"{value}x"
    identity = dataclasses.replace(IDENTITY, **{field: other})
    with engine_of("recurrent", tmp_path, identity=identity) as engine:
        missed = answer(engine, asked(100))
    assert missed.token_ids == cold.token_ids
    if field in {"drafter", "mtp"}:  # they count for their own parts alone
        assert missed.tier is CacheTier.FILE
    else:
        assert (missed.tier, missed.usage.cached_tokens) == (CacheTier.NONE, 0)
        assert (missed.miss_reason, missed.miss_field) == (CacheMiss.IDENTITY_DIFFERS, field)


def test_a_damaged_file_is_a_named_miss_and_is_written_again(tmp_path):
    with engine_of("packed", tmp_path) as engine:
        cold = answer(engine, asked(700))
    largest = max(files_of(tmp_path), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size // 2, 3)
    with engine_of("packed", tmp_path) as engine:
        missed = answer(engine, asked(700))
        assert missed.token_ids == cold.token_ids
        assert (missed.tier, missed.miss_reason) == (CacheTier.NONE, CacheMiss.DAMAGED)
        engine.assert_pages_are_accounted_for()
    with engine_of("packed", tmp_path) as engine:
        assert answer(engine, asked(700)).usage.cached_tokens == 706


def test_a_disk_that_refuses_to_read_at_any_time_costs_time_only(tmp_path):
    with engine_of("packed", tmp_path) as engine:
        cold = answer(engine, asked(700))
    disk, reasons = FaultyDisk(), []
    with engine_of("packed", tmp_path, disk=disk) as engine:
        assert answer(engine, asked(700)).tier is CacheTier.FILE
        for at in range(1, disk.calls["read"] + 1):
            engine.store.drop_all()
            disk.refuse("read", OSError(errno.EIO, "Input/output error"), at=at)
            missed = answer(engine, asked(700))
            assert missed.token_ids == cold.token_ids
            assert missed.usage.cached_tokens < 706
            reasons.append(missed.miss_reason)
        assert set(reasons) == {CacheMiss.IO_ERROR}
        engine.store.drop_all()
        assert answer(engine, asked(700)).tier is CacheTier.FILE
        engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("operation", ["create", "write", "flush", "move"])
def test_a_disk_that_refuses_to_write_loses_the_file_and_nothing_else(number, operation, tmp_path):
    disk = FaultyDisk()
    with open_archive(tmp_path, disk=disk) as archive:
        disk.refuse(operation, OSError(number, os.strerror(number)))
        with toy_engine(ReaderModel(), TOKENIZER, archive=archive, identity=IDENTITY) as engine:
            cold = answer(engine, asked(300))
            archive.flush()
            assert archive.counts().saved == 0
            assert sum(archive.counts().refused.values()) >= 1, "the rules, perhaps what follows"
            warm = answer(engine, asked(300))
            assert (warm.tier, warm.token_ids) == (CacheTier.DEVICE, cold.token_ids)


def test_without_room_on_the_disk_answers_are_right_and_cold(tmp_path):
    limits = SessionLimits(quota_bytes=1000, min_free_bytes=0)
    answers = []
    for _ in range(2):
        with engine_of("packed", tmp_path, limits=limits) as engine:
            answers.append(answer(engine, asked(300)))
    assert answers[0].token_ids == answers[1].token_ids
    assert [found.tier for found in answers] == [CacheTier.NONE] * 2
    assert files_of(tmp_path) == []


class HeldDisk(Disk):
    """Waits before it creates a file, and does something when it has read twice."""

    def __init__(self) -> None:
        self.may_create = threading.Event()
        self.on_read: Callable[[], None] = lambda: None

    def create(self, path: Path, num_bytes: int) -> int:
        self.may_create.wait()
        return super().create(path, num_bytes)

    def read(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        self.on_read()
        return super().read(descriptor, into, offset)


def test_a_full_queue_drops_a_segment_that_the_next_request_brings_again(tmp_path):
    disk = HeldDisk()
    with (
        open_archive(tmp_path, disk=disk, queued_bytes=1) as archive,
        toy_engine(ReaderModel(), TOKENIZER, archive=archive, identity=IDENTITY) as engine,
    ):
        answer(engine, asked(300))
        counts = archive.counts()
        assert (counts.saved, counts.dropped) == (0, 1)
        assert counts.queued_bytes > 0
        disk.may_create.set()
        archive.flush()
        assert archive.counts().saved == 1
        assert answer(engine, asked(300, "again?")).tier is CacheTier.DEVICE
        archive.flush()
        assert (archive.counts().saved, archive.counts().queued_bytes) == (2, 0)
        engine.store.drop_all()
        assert answer(engine, asked(300)).usage.cached_tokens == 306


def test_whoever_gives_up_while_files_are_read_leaves_nothing_behind(tmp_path):
    disk = HeldDisk()
    disk.may_create.set()
    with engine_of("packed", tmp_path, disk=disk) as engine:
        cold = answer(engine, asked(1800))
        engine.store.drop_all()
        gate, events = threading.Event(), queue.SimpleQueue[Event]()
        disk.on_read = gate.wait
        job = engine.client._prepare(asked(1800), events.put, 0.0)
        engine.worker.submit(job)
        job.cancelled.set()
        gate.set()
        while not isinstance(events.get(timeout=30), Failed):
            pass
        warm = answer(engine, asked(1800))
        assert (warm.tier, warm.token_ids) == (CacheTier.FILE, cold.token_ids)
        engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize(("num_pages", "tier"), [(6, CacheTier.FILE), (3, CacheTier.NONE)])
def test_restoring_makes_room_as_far_as_there_is_any(num_pages, tier, tmp_path):
    with engine_of("exact", tmp_path) as engine:
        cold = answer(engine, asked(600))
    with engine_of("exact", tmp_path, num_pages=num_pages) as engine:
        answer(engine, ask("else", document(text_of(500, "other"), "e"), max_tokens=2))
        found = answer(engine, asked(600))
        assert (found.tier, found.token_ids) == (tier, cold.token_ids)
        assert engine.store.num_evicted > 0
        assert (found.miss_reason is CacheMiss.EVICTED) == (tier is CacheTier.NONE)
        engine.assert_pages_are_accounted_for()


def test_parallel_requests_from_mixed_tiers_keep_to_their_documents(tmp_path):
    marks = {name: f"MARK-{name}-{at:04d}" for at, name in enumerate("ABCDE")}
    requests = [
        ask(
            f"{at}: what is the mark?",
            RULES,
            document(text_of(300) + marks[name] + text_of(50, name), name),
            name=f"{name}{at}",
        )
        for at, name in enumerate("ABCDE" * 5)
    ]
    for _ in range(2):
        with (
            open_archive(tmp_path) as archive,
            toy_engine(
                mark_reader(),
                TOKENIZER,
                archive=archive,
                identity=IDENTITY,
                num_pages=14,
                max_slots=4,
            ) as engine,
        ):
            tiers = set()
            for _ in range(4):
                answers = engine.complete_all(requests)
                for request, finished in zip(requests, answers, strict=True):
                    assert finished.text == marks[request.id[0]]
                    tiers.add(finished.tier)
                archive.flush()
            assert {CacheTier.DEVICE, CacheTier.FILE} <= tiers
            engine.assert_pages_are_accounted_for()


def test_passages_that_one_question_chose_are_remembered_and_not_written(tmp_path):
    passages = TextSegment(SegmentKind.PASSAGES, text_of(300), (Span("d", 0, 0, 300),))
    request = ask("what?", RULES, passages, max_tokens=4)
    with engine_of("exact", tmp_path) as engine:
        answer(engine, request)
        assert answer(engine, request).usage.cached_tokens == len(RULES.text) + 300
    assert len(files_of(tmp_path)) == 1, "the rules"


def test_a_dropped_document_does_not_come_back_and_its_bytes_are_gone(tmp_path):
    with open_archive(tmp_path) as archive:
        folder = archive._folder
        with toy_engine(ReaderModel(), TOKENIZER, archive=archive, identity=IDENTITY) as engine:
            answer(engine, asked(300))
            archive.flush()
            assert len(files_of(tmp_path)) == 2
            assert folder.delete_source("d") == 1
            assert engine.worker.drop_source("d").result() == 1
            found = answer(engine, asked(300))
            assert found.usage.cached_tokens == len(RULES.text)
            archive.flush()
            assert len(files_of(tmp_path)) == 1, "the rules alone"
