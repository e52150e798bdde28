"""An engine that is killed while it saves leaves what answers bit for bit, or is not there."""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.restarted import LENGTHS, engine_on, told
from tests.models.families import FAMILIES
from tests.models.toy_files import write_toy
from tests.processes import ROOT, environment
from tests.sessions.samples import SHARED_MEMORY

NUM_KILLS = 20
# Nothing is there, or another document behind the same rules.
ABSENT = {"none_stored", "prefix_differs"}


@pytest.fixture
def sessions() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="ragflash-") as name:
        yield Path(name)


class Saver:
    """A process of `saving.py`; the documents it had flushed when it died are in `flushed`."""

    def __init__(self, sessions: Path, model: Path, former: str, new: str, kill_at: int) -> None:
        self.found: list[dict[str, Any]] = []
        self.flushed: set[int] = set()
        arguments = [sessions, model, former, new, kill_at]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.saving", *map(str, arguments)],
            cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "saving\n":
                break
            self.found.append(json.loads(line))
        self.began_at = time.monotonic()

    def kill(self, after_s: float | None) -> None:
        """Kill it at a moment, or let it do so itself."""
        try:
            self._process.wait(after_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        assert self._process.wait() == -signal.SIGKILL
        self.flushed = {int(line) for line in self._rest() if line != "saved"}

    def finish(self) -> tuple[float, int]:
        """Let it save everything and end; return how long that took, and the number of writes."""
        *_, saved, num_writes = self._rest()
        assert (self._process.wait(), saved) == (0, "saved")
        self.flushed = {*range(len(LENGTHS))}
        return time.monotonic() - self.began_at, int(num_writes)

    def _rest(self) -> list[str]:
        """End its input, and return what it still said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with self._process.stdout as stdout:
            return stdout.read().split()


def check(found: list[dict[str, Any]], cold: list[dict[str, Any]], flushed: set[int]) -> int:
    """Compare what a new process answered with what was computed; return how much was stored."""
    num_stored = 0
    assert len(found) == len(cold)
    for number, (answer, computed) in enumerate(zip(found, cold, strict=True)):
        assert (answer["tokens"], answer["logprobs"]) == (computed["tokens"], computed["logprobs"])
        assert answer["rows"] == answer["computed"] + max(0, len(answer["tokens"]) - 1)
        if answer["cached"] >= LENGTHS[number]:
            assert (answer["tier"], answer["miss_reason"]) == ("file", None)
            assert computed["rows"] - answer["rows"] == answer["cached"]
            num_stored += 1
        else:
            assert number not in flushed, "a segment that was written whole is lost"
            assert answer["miss_reason"] in ABSENT
    return num_stored


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_of_an_engine_that_saves(tmp_path, sessions, record_testsuite_property):
    """Half of them in the middle of a write, half at any time; who comes next looks at it."""
    model = write_toy(tmp_path / "toy.gguf", FAMILIES["qwen35"])
    with engine_on(model, None) as (engine, _):
        cold = [told(engine, number, cache=False) for number in range(len(LENGTHS))]
    chance = random.Random(0)
    first = Saver(sessions, model, "nobody", "0", 0)
    assert check(first.found, cold, set()) == 0
    takes_s, num_writes = first.finish()
    flushed, num_stored = first.flushed, []
    for kill in range(1, NUM_KILLS + 1):
        in_a_write = kill % 2 == 1
        kill_at = chance.randint(1, num_writes) if in_a_write else 0
        saver = Saver(sessions, model, str(kill - 1), str(kill), kill_at)
        num_stored.append(check(saver.found, cold, flushed))
        saver.kill(None if in_a_write else chance.uniform(0, takes_s))
        flushed = saver.flushed
    last = Saver(sessions, model, str(NUM_KILLS), "last", 0)
    num_stored.append(check(last.found, cold, flushed))
    last.finish()
    record_testsuite_property("engine_kills", NUM_KILLS)
    assert num_stored[0] == len(LENGTHS)
    assert 0 < sum(num_stored[1:]) < NUM_KILLS * len(LENGTHS)
    assert list(sessions.glob("quarantine/*")) == [], "no torn file was ever accepted"
