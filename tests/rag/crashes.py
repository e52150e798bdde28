"""Kills a process that works on a library, over and over, and looks at what is left.

A program of its own, started once: it imports the library (and no torch), then forks a child for
every kill. The child counts the boundaries of writes (statements of SQLite that change something
for good, operations on files, calls of the vector store) and kills itself with SIGKILL at the one
it was told. The next child opens the same folder, lets it recover, and checks everything; what
the former was killed at has to have happened once or not at all.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import ragflash.rag.points
from conftest import HashEmbedder, TextParser
from ragflash.rag.disk import Disk
from ragflash.rag.index_edge import QdrantEdgeIndex
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import DocumentState, DuplicatePolicy, JobState, Scope
from tests.kills import WAIT_S, Bomb, fork, was_killed

MINE = Scope(frozenset({"mine"}))
WRITES = ("INSERT", "UPDATE", "DELETE", "COMMIT", "PRAGMA wal", "ALTER", "CREATE")


class Mine(Bomb):
    """A bomb with a boundary at each of the library's lasting writes."""

    def wrap(self, owner: type, name: str) -> None:
        """Put a boundary before a method; behind it is before the next one."""
        whole = getattr(owner, name)

        def ticking(*args, **options):
            self.tick()
            return whole(*args, **options)

        setattr(owner, name, ticking)

    def install(self) -> None:
        for name in ("make_folder", "move", "remove", "remove_folder"):
            self.wrap(Disk, name)
        for name in ("upsert", "delete_document", "flush", "close"):
            self.wrap(QdrantEdgeIndex, name)
        write = Disk.write

        def torn(disk, path, blocks):
            def halves():
                for block in blocks:
                    yield block[: len(block) // 2]
                    self.tick()
                    yield block[len(block) // 2 :]

            self.tick()
            write(disk, path, halves())

        Disk.write = torn
        opened = ragflash.rag.assemble.Database.open.__func__

        def traced(cls, path):
            database = opened(cls, path)
            connection = database._connection

            def trace(statement: str) -> None:
                lasting = statement.startswith("COMMIT") or not connection.in_transaction
                if lasting and statement.lstrip().startswith(WRITES):
                    self.tick()

            connection.set_trace_callback(trace)
            return database

        ragflash.rag.assemble.Database.open = classmethod(traced)


@dataclass
class Diary:
    """What children have told before they were killed: who must be there, and who must not."""

    expected: dict[str, str] = field(default_factory=dict)

    def note(self, line: str) -> None:
        text, _, fate = line.partition("\t")
        self.expected[text] = fate


@dataclass
class Story:
    """One child's work on the library."""

    library: Library
    embedder: HashEmbedder
    pipe: int

    def tell(self, text: str, fate: str) -> None:
        os.write(self.pipe, f"{text}\t{fate}\n".encode())

    def add(self, text: str, policy=DuplicatePolicy.REUSE, *, wait=True):
        result = self.library.add(MINE, "mine", "a.txt", text.encode(), policy)
        if wait:
            assert self.library.wait(MINE, result.job.id, WAIT_S).state.is_final
        return result

    def work(self, number: int) -> None:
        """Add, replace, cancel and delete; every step is told before and after it."""
        short = f"canary{number}short of one passage"
        long, dropped = (
            "\n\n".join(f"canary{number}{name} {n}. " + "Filling words. " * 70 for n in range(5))
            for name in ("long", "dropped")
        )
        doomed = f"canary{number}doomed"
        for text in (short, long, doomed):
            self.tell(key(text), "maybe")
            self.add(text)
            self.tell(key(text), "once")
        self.add(long, DuplicatePolicy.REPLACE)
        self.tell(key(dropped), "maybe failed")
        self.drop(dropped)
        (document,) = documents_of(self.library, key(doomed))
        self.tell(key(doomed), "maybe")
        self.library.delete(MINE, document.id)
        self.tell(key(doomed), "gone")

    def drop(self, text: str) -> None:
        """Add a document and cancel the work when it has points already."""
        known, batches, jobs = threading.Event(), count(1), []

        def cancel_in_second() -> None:
            if next(batches) == 2:
                assert known.wait(WAIT_S)
                self.library.cancel(MINE, jobs[0])

        self.embedder.before_batch = cancel_in_second
        jobs.append(self.add(text, wait=False).job.id)
        known.set()
        assert self.library.wait(MINE, jobs[0], WAIT_S).state is JobState.CANCELLED
        self.embedder.before_batch = lambda: None

    def settle(self) -> None:
        """Wait until no job is open and the worker has nothing in hand."""
        library = self.library
        with library._database.changed:
            assert library._database.changed.wait_for(
                lambda: library._jobs.count_open() == 0 and library._worker._current is None,
                WAIT_S,
            )

    def check(self, expected: dict[str, str]) -> None:
        library = self.library
        for text, fate in expected.items():
            found = documents_of(library, text)
            states = [document.state for document in found]
            assert len(found) <= 1, (text, fate, states)
            assert len(found) == 1 or fate != "once", (text, fate)
            assert not found or fate != "gone", (text, fate)
            allowed = {DocumentState.READY}
            if "failed" in fate:
                allowed.add(DocumentState.FAILED)
            assert set(states) <= allowed, (text, fate, found)
            hits = {
                hit.chunk.document_id
                for hit in library.search(MINE, text, limit=50)
                if text in hit.chunk.text
            }
            ready = {d.id for d in found if d.state is DocumentState.READY}
            assert hits == ready, (text, fate, hits, ready)
        index = library._eraser._index
        records = library.list(MINE).items
        for document in records:
            chunks = library.chunks(MINE, document.id)
            assert index.count("mine", document.id) == len(chunks) == document.chunks, document
            ready = document.state is DocumentState.READY
            assert ready == bool(chunks), document
            assert not ready or library.document(MINE, document.id).text
            job = library._jobs.of_document(document.id)
            assert job.state is (JobState.DONE if ready else JobState.CANCELLED), job
        found = library._reconciler.run(dry_run=True, count_points=True)
        assert found.is_clean, found

    def empty(self) -> None:
        for document in self.library.list(MINE).items:
            self.library.delete(MINE, document.id)
        assert self.library._eraser._index.documents() == set()
        assert self.library._files.digests() == set()


def key(text: str) -> str:
    return text.split(maxsplit=1)[0]


def documents_of(library: Library, canary: str) -> list:
    return [
        document
        for document in library.list(MINE).items
        if library.content_path(MINE, document.id).read_bytes().startswith(canary.encode())
    ]


def live(folder: Path, diary: Diary, bomb: Mine, pipe: int, number: int, *, early: bool) -> None:
    """Recover, check, and then work; the bomb is armed for the first or for the last."""
    bomb.install()
    ragflash.rag.points.EMBED_BATCH = 2
    bomb.armed = early
    embedder = HashEmbedder(8)
    library = Library.open(LibraryConfig(folder), embedder, parser=TextParser())
    story = Story(library, embedder, pipe)
    story.settle()
    bomb.armed = False
    story.check(diary.expected)
    story.empty()
    os.write(pipe, b"\tchecked\n")
    if not early:
        bomb.armed = True
        story.work(number)
        library.close()
    os.write(pipe, f"\tboundaries {bomb.count}\n".encode())


class Nursery:
    """Starts children one after the other over one folder, and keeps the diary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.diary = Diary()
        self.kills = 0
        self.boundaries = 0
        self._number = 0

    def raise_child(
        self, fuse: int | None = None, *, early: bool = False, kill_after_s: float | None = None
    ) -> bool:
        """Let a child live; whether it was killed."""
        self._number += 1
        ours, theirs = os.pipe()
        bomb, number = Mine(fuse), self._number
        child = fork(lambda: live(self.folder, self.diary, bomb, theirs, number, early=early))
        os.close(theirs)
        with os.fdopen(ours, encoding="utf-8") as told:
            for line in told:
                text, fate = line.rstrip("\n").split("\t")
                if text:
                    self.diary.note(f"{text}\t{fate}")
                elif fate == "checked":
                    self.diary.expected.clear()
                    if kill_after_s is not None:
                        time.sleep(kill_after_s)
                        os.kill(child, signal.SIGKILL)
                else:
                    self.boundaries = int(fate.split()[1])
        killed = was_killed(child)
        self.kills += killed
        return killed


def kill_all_over(
    nursery: Nursery, *, seed: int, every: int, offset: int, double: int, timed: int
) -> dict[str, int]:
    """Kill at every `every`-th boundary of the work, then in recovery, then at any time."""
    chance = random.Random(seed)
    assert not nursery.raise_child(), "nothing was to be killed"
    boundaries = nursery.boundaries
    for fuse in range(offset, boundaries, every):
        nursery.raise_child(fuse)
    enumerated = nursery.kills
    for step in range(double):
        nursery.raise_child(chance.randrange(boundaries))
        nursery.raise_child(step, early=True)
    for _ in range(timed):
        nursery.raise_child(kill_after_s=chance.uniform(0.0, 0.2))
    nursery.raise_child(early=True)
    return {"kills": nursery.kills, "enumerated": enumerated, "boundaries": boundaries}


class Poison(TextParser):
    """Some document takes the whole process with it."""

    def parse(self, source, name, *, progress=None, cancelled=None):
        if name == "poison.txt":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().parse(source, name, progress=progress, cancelled=cancelled)


def meet_poison(folder: Path) -> None:
    """Add what kills and what does not, unless they are there, and see what became of them."""
    embedder = HashEmbedder(8)
    library = Library.open(LibraryConfig(folder), embedder, parser=Poison())
    known = {document.name for document in library.list(MINE).items}
    for name in ("poison.txt", "good.txt"):
        if name not in known:
            library.add(MINE, "mine", name, name.encode())
    Story(library, embedder, -1).settle()
    found = {document.name: document for document in library.list(MINE).items}
    good, poison = found["good.txt"], found["poison.txt"]
    assert good.state is DocumentState.READY
    assert (poison.state, poison.reason) == (DocumentState.FAILED, "crashed")
    job = library._jobs.of_document(poison.id)
    assert job.code == "internal_error"
    assert "ended 3 times while it worked on poison.txt (stage parsing)" in job.detail
    library.delete(MINE, poison.id)


def main(folder: Path, plan: dict[str, int]) -> None:
    if plan.pop("poison", False):
        deaths = 0
        while was_killed(fork(lambda: meet_poison(folder))):
            deaths += 1
        summary = {"deaths": deaths}
    else:
        summary = kill_all_over(Nursery(folder), **plan)
    assert "torch" not in sys.modules
    print(json.dumps(summary))


if __name__ == "__main__":
    words = (argument.partition("=") for argument in sys.argv[2:])
    main(Path(sys.argv[1]), {name: int(value) for name, _, value in words})
