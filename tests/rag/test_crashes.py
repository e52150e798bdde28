"""A process that is killed anywhere loses nothing, doubles nothing, and leaves nothing behind."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import finish, start

PROGRAM = Path(__file__).with_name("crashes.py")
SHARED_MEMORY = Path("/dev/shm")
ROOM_BYTES = 1 << 30
# A kill leaves the page cache alone, so that a folder in memory tests the same and is faster.
PARENT = (
    SHARED_MEMORY
    if SHARED_MEMORY.is_dir()
    and os.access(SHARED_MEMORY, os.W_OK)
    and shutil.disk_usage(SHARED_MEMORY).free > ROOM_BYTES
    else None
)


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(dir=PARENT, prefix="ragflash-") as parent:
        yield [Path(parent) / str(number) for number in range(2)]


def start_plan(folder: Path, **plan: int) -> subprocess.Popen[str]:
    return start(PROGRAM, folder, *(f"{name}={value}" for name, value in plan.items()))


def kill_all_over(folders: list[Path], **plan: int) -> list[dict[str, int]]:
    """Two programs at once, each with every second of the chosen boundaries."""
    step = plan["every"]
    running = [
        start_plan(folder, **{**plan, "seed": seed, "every": 2 * step, "offset": seed * step})
        for seed, folder in enumerate(folders)
    ]
    return [finish(process) for process in running]


def test_killed_at_every_write_everything_is_there_once(folders, record_testsuite_property):
    """More than 200 kills: at every write of the work, in recovery after one, and at any time."""
    summaries = kill_all_over(folders, every=1, double=16, timed=12)
    kills = sum(summary["kills"] for summary in summaries)
    boundaries = summaries[0]["boundaries"]
    record_testsuite_property("kills", kills)
    record_testsuite_property("boundaries", boundaries)
    assert kills >= 200
    # Progress is reported now and then, so that not every child has the same number.
    assert sum(summary["enumerated"] for summary in summaries) >= 0.8 * boundaries


def test_a_document_that_the_process_dies_of_is_given_up(folders):
    summary = finish(start_plan(folders[0], poison=1))
    assert summary == {"deaths": 3}
