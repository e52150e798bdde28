"""Where a figure comes from: command, commit, machine."""

import os
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import ragflash
from ragflash.engine.cards import list_cards


def provenance() -> dict[str, Any]:
    """Describe this run; `commit` is empty outside a git checkout, `+` marks local changes."""
    return {
        "command": " ".join(["ragflash", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": ragflash.__version__,
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "cards": [asdict(card) for card in list_cards()],
        },
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _commit() -> str:
    root = Path(ragflash.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
