"""A writer that is killed anywhere leaves no torn file that is accepted, and loses no whole one."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sessions.samples import SHARED_MEMORY

PROGRAM = Path(__file__).with_name("crashes.py")
NUM_KILLS = 1000
NUM_PROGRAMS = 2


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="ragflash-") as name:
        yield Path(name)


def start(path: Path, seed: int, kills: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(path), str(seed), str(kills)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    told, complaints = process.communicate()
    assert process.returncode == 0, complaints[-4000:]
    return json.loads(told)


def test_a_thousand_kills(parent, record_testsuite_property):
    running = [
        start(parent / str(seed), seed, NUM_KILLS // NUM_PROGRAMS) for seed in range(NUM_PROGRAMS)
    ]
    summaries = [finish(process) for process in running]
    record_testsuite_property("session_kills", sum(summary["kills"] for summary in summaries))
    for summary in summaries:
        assert summary["kills"] >= NUM_KILLS // NUM_PROGRAMS
        assert summary["rounds"] >= 3  # every boundary, more than once, with other sizes
        assert min(summary["timed"], summary["early"]) > 0
