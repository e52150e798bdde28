"""Kills a process that stores sessions, over and over, and looks at what is left.

A program of its own, started once: it imports the sessions (and no torch), then forks a child for
every kill. A child opens the folder, checks what its predecessor left, empties it, and works until
it kills itself with SIGKILL at the boundary it was told (before every operation on files, in the
middle of every write, before every statement of SQLite that lasts), or is killed at any time.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from ragflash.kvcache.allocator import PageForm
from ragflash.sessions import FileMiss, PageItem, PartItem, SessionFolder, SnapshotItem
from ragflash.sessions.disk import Disk
from ragflash.sessions.records import Item
from tests.kills import Bomb, fork, was_killed
from tests.sessions.samples import bytes_of, fetch, files_of, open_folder, store

LASTING = ("INSERT", "UPDATE", "DELETE", "CREATE", "PRAGMA wal", "PRAGMA journal")
Segments = tuple[tuple[int, ...], ...]


class MinedDisk(Disk):
    """A boundary before each operation, and in the middle of each write."""

    def __init__(self, bomb: Bomb) -> None:
        self._bomb = bomb

    def make_folder(self, path):
        self._bomb.tick()
        super().make_folder(path)

    def create(self, path, num_bytes):
        self._bomb.tick()
        return super().create(path, num_bytes)

    def write(self, descriptor, data, offset):
        half = len(data) // 2
        for piece, at in ((data[:half], offset), (data[half:], offset + half)):
            self._bomb.tick()
            super().write(descriptor, piece, at)

    def flush(self, descriptor):
        self._bomb.tick()
        super().flush(descriptor)

    def move(self, source, target):
        self._bomb.tick()
        super().move(source, target)

    def remove(self, path):
        self._bomb.tick()
        super().remove(path)

    def flush_folder(self, path):
        self._bomb.tick()
        super().flush_folder(path)

    def make_mark(self, path):
        self._bomb.tick()
        super().make_mark(path)


def segments_of(number: int) -> Segments:
    """Prompt of a session: an odd one follows the even one before it."""
    own = tuple(random.Random(number).choices(range(1 << 32), k=1 + number % 300))
    return (*segments_of(number - 1), own) if number % 2 else (own,)


def items_of(number: int) -> list[Item]:
    chance = random.Random(-number)
    sizes = [chance.choice((1, 4095, 4096, 4097, 20_000)) for _ in range(4)]
    return [
        PageItem(PageForm.EXACT, 0, 256, sizes[0]),
        PageItem(PageForm.PACKED, 1, 256, sizes[1]),
        SnapshotItem(300, 0, sizes[2]),
        PartItem("drafter", sizes[3]),
    ]


def source_of(number: int) -> str:
    return f"doc_{number}"


class Story:
    """One child's work on the folder."""

    def __init__(self, folder: SessionFolder, path: Path, pipe: int) -> None:
        self.folder = folder
        self.path = path
        self.pipe = pipe

    def tell(self, number: int, fate: str) -> None:
        os.write(self.pipe, f"{number} {fate}\n".encode())

    def work(self, first: int) -> None:
        """Store two that belong together and one alone; pin and delete the latter."""
        for number in (first, first + 1, first + 2):
            self.tell(number, "maybe")
            assert self.store(number) is None
            self.tell(number, "there")
        self.folder.pin(self.folder.list()[0].id)
        self.tell(first + 2, "maybe")
        self.folder.delete_source(source_of(first + 2))
        self.tell(first + 2, "gone")

    def store(self, number: int):
        return store(
            self.folder,
            *segments_of(number),
            items=items_of(number),
            source_ids=[source_of(number)],
        )

    def check(self, fates: dict[int, str]) -> None:
        found = 0
        for number, fate in fates.items():
            segments = segments_of(number)
            payload = fetch(self.folder, *segments)
            if isinstance(payload, FileMiss):
                assert fate != "there", (number, payload)
                continue
            assert fate != "gone", number
            assert payload == bytes_of(items_of(number), segments), number
            found += 1
        counts = self.folder.counts()
        assert counts.num_set_aside == 0
        assert counts.num_segments == found == len(files_of(self.path))
        assert list(self.path.glob("*/*.part")) == []

    def empty(self) -> None:
        while infos := self.folder.list():
            self.folder.delete(infos[0].id)
        assert files_of(self.path) == []


def live(
    path: Path, fates: dict[int, str], bomb: Bomb, pipe: int, first: int, *, early: bool
) -> None:
    """Recover, check, and then work; the bomb is armed for the first or for the last."""
    bomb.armed = early
    folder = open_folder(path, disk=MinedDisk(bomb), num_readers=1)
    bomb.armed = False
    story = Story(folder, path, pipe)
    story.check(fates)
    if early:
        return
    story.empty()
    os.write(pipe, b"checked\n")
    folder._index._connection.set_trace_callback(
        lambda statement: bomb.tick() if statement.startswith(LASTING) else None
    )
    bomb.armed = True
    story.work(first)
    os.write(pipe, f"boundaries {bomb.count}\n".encode())


class Nursery:
    """Starts children one after the other over one folder, and notes what they tell.

    Attributes:
        fates: Of each session whether it must be `there`, or `gone`, or `maybe` either.
        kills: How many children were killed.
        boundaries: In the work of a child that was not.
        work_s: How long that took.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fates: dict[int, str] = {}
        self.kills = 0
        self.boundaries = 0
        self.work_s = 0.0
        self._number = 0

    def raise_child(
        self, fuse: int | None = None, *, early: bool = False, kill_after_s: float | None = None
    ) -> bool:
        """Let a child live; whether it was killed."""
        self._number += 4
        ours, theirs = os.pipe()
        bomb, first = Bomb(fuse), self._number
        child = fork(lambda: live(self.path, self.fates, bomb, theirs, first, early=early))
        os.close(theirs)
        started = 0.0
        with os.fdopen(ours, encoding="ascii") as told:
            for line in told:
                word, _, rest = line.strip().partition(" ")
                if word == "boundaries":
                    self.boundaries = int(rest)
                    self.work_s = time.monotonic() - started
                elif word == "checked":
                    self.fates.clear()
                    started = time.monotonic()
                    if kill_after_s is not None:
                        time.sleep(kill_after_s)
                        os.kill(child, signal.SIGKILL)
                else:
                    self.fates[int(word)] = rest
        killed = was_killed(child)
        self.kills += killed
        return killed


def main(path: Path, seed: int, kills: int) -> None:
    """Kill at every boundary in turn; now and then at any time, and while recovering."""
    chance = random.Random(seed)
    nursery = Nursery(path)
    assert not nursery.raise_child(), "nothing was to be killed"
    boundaries = nursery.boundaries
    fuse = timed = early = 0
    while nursery.kills < kills:
        kind = chance.randrange(10)
        if kind < 2:
            timed += nursery.raise_child(kill_after_s=chance.uniform(0.0, nursery.work_s))
        elif kind == 2:
            nursery.raise_child(chance.randrange(boundaries))
            early += nursery.raise_child(chance.randrange(3), early=True)
        else:
            nursery.raise_child(fuse % boundaries)
            fuse += 1
    nursery.raise_child(early=True)
    assert "torch" not in sys.modules
    summary = {"kills": nursery.kills, "timed": timed, "early": early}
    print(json.dumps({**summary, "boundaries": boundaries, "rounds": fuse // boundaries}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
