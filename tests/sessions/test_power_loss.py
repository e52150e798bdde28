"""Whatever is left without power: what is found is whole, and what was promised is there."""

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragflash.sessions import FileMiss, SessionFolder
from tests.sessions.power import RecordingDisk, build
from tests.sessions.samples import (
    DOCUMENT,
    ITEMS,
    RULES,
    SHARED_MEMORY,
    TURN,
    bytes_of,
    fetch,
    open_folder,
    store,
)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder where flushing takes no time."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="ragflash-") as name:
        yield Path(name)


Prompt = tuple[tuple[int, ...], ...]
PROMPTS: tuple[Prompt, ...] = ((RULES,), (RULES, DOCUMENT), (TURN,))


class Experiment:
    """Works on a folder, and after every operation looks at all that a power failure may leave."""

    def __init__(self, memory: Path, *, lies: bool = False) -> None:
        self.promised: dict[Prompt, bool] = {}
        self.num_wrecks = 0
        self.num_found = 0
        self._copy = memory / "copy"
        self._path = memory / "sessions"
        self._chance = random.Random(0)
        self._disk = RecordingDisk(lies=lies)
        self.folder = open_folder(self._path, disk=self._disk, num_readers=1)
        self._disk.after_each = self.look

    def do(self, step: Callable[[], object], *prompts: Prompt, there: bool) -> None:
        """Take a step; afterwards prompts are promised to be there, or not."""
        for prompt in prompts:
            self.promised.pop(prompt, None)
        step()
        self.promised |= dict.fromkeys(prompts, there)

    def look(self) -> None:
        for wreck in self._disk.wrecks(self._chance):
            build(wreck, self._path, self._copy)
            if self._chance.random() < 0.5:  # an index that knows more than the disk
                for name in self._path.glob("index.sqlite*"):
                    shutil.copy(name, self._copy)
            folder = open_folder(self._copy, num_readers=1)
            self.check(folder)
            folder.close()
            shutil.rmtree(self._copy)
            self.num_wrecks += 1

    def check(self, folder: SessionFolder) -> None:
        for prompt in PROMPTS:
            found = fetch(folder, *prompt)
            is_there = not isinstance(found, FileMiss)
            assert not is_there or found == bytes_of(ITEMS, prompt)
            self.num_found += is_there
            if not self._disk.lies:
                assert is_there is self.promised.get(prompt, is_there)
        if not self._disk.lies:
            assert folder.counts().num_set_aside == 0


def work(experiment: Experiment) -> None:
    folder = experiment.folder
    for prompt in PROMPTS:
        experiment.do(lambda prompt=prompt: store(folder, *prompt), prompt, there=True)
    first = folder.list()[-1].id
    experiment.do(lambda: folder.pin(first), there=True)
    experiment.do(lambda: folder.delete(first), PROMPTS[0], PROMPTS[1], there=False)
    experiment.do(lambda: store(folder, RULES), PROMPTS[0], there=True)
    folder.close()


def test_nothing_torn_is_found_and_nothing_promised_is_lost(memory):
    experiment = Experiment(memory)
    work(experiment)
    assert experiment.num_wrecks > 200
    assert experiment.num_found > 100


def test_a_disk_that_does_not_flush_costs_sessions_and_never_right_answers(memory):
    experiment = Experiment(memory, lies=True)
    work(experiment)
    assert experiment.num_wrecks > 400
    assert experiment.num_found > 100
