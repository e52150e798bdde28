"""A writer that is killed anywhere leaves no torn file that is accepted, and loses no whole one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import finish, start
from tests.sessions.samples import SHARED_MEMORY

PROGRAM = Path(__file__).with_name("crashes.py")
NUM_KILLS = 1000
NUM_PROGRAMS = 2


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="ragflash-") as name:
        yield Path(name)


def test_a_thousand_kills(parent, record_testsuite_property):
    running = [
        start(PROGRAM, parent / str(seed), seed, NUM_KILLS // NUM_PROGRAMS)
        for seed in range(NUM_PROGRAMS)
    ]
    summaries = [finish(process) for process in running]
    record_testsuite_property("session_kills", sum(summary["kills"] for summary in summaries))
    for summary in summaries:
        assert summary["kills"] >= NUM_KILLS // NUM_PROGRAMS
        assert summary["rounds"] >= 3  # every boundary, more than once, with other sizes
        assert min(summary["timed"], summary["early"]) > 0
