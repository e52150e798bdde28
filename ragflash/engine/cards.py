"""NVIDIA cards as the driver's own tool describes them; no torch."""

import shutil
import subprocess
from dataclasses import dataclass

_PROGRAM = "nvidia-smi"
_FIELDS = "name,memory.total,memory.used,compute_cap,driver_version"
_LONGEST_S = 20


@dataclass(frozen=True, slots=True)
class Card:
    """One card.

    Attributes:
        memory_bytes: All of it.
        used_bytes: Held by somebody.
        compute_capability: Such as `8.9`.
        driver: Its version.
    """

    name: str
    memory_bytes: int
    used_bytes: int
    compute_capability: str
    driver: str


def list_cards() -> tuple[Card, ...]:
    """Return the cards that the driver sees; none where there is no driver, or it fails."""
    if shutil.which(_PROGRAM) is None:
        return ()
    command = [_PROGRAM, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_S, check=True
        )
        return tuple(map(_card, run.stdout.splitlines()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def _card(line: str) -> Card:
    name, total, used, capability, driver = (field.strip() for field in line.split(","))
    return Card(name, int(total) << 20, int(used) << 20, capability, driver)
