"""Programs that tests start, which import what the tests do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_SOURCES = [ROOT, *(ROOT / name for name in ("kernels", "ingest", "prompts"))]


def environment(**more: str) -> dict[str, str]:
    """This process's environment with our sources on the path, and `more`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, _SOURCES)), **more}


def start(program: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a program that computes on one thread."""
    return subprocess.Popen(
        [sys.executable, str(program), *map(str, arguments)],
        env=environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Any:
    """Wait for a program's end, and return what it told as JSON."""
    told, complaints = process.communicate()
    assert process.returncode == 0, complaints[-4000:]
    return json.loads(told)
