"""The table of docs/gpu.md shows what docs/results holds."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
SMALLEST = {"GB": 1e9}


def figures() -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("gpu.json", "gpu_small.json"):
        found |= json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))
    return found


def assert_shows(cell: str, value: float | None) -> None:
    """Compare with as many digits as are shown; a dash stands for what was not measured."""
    if cell == "–":
        assert value is None
        return
    number, unit = cell.split()
    digits = len(number.partition(".")[2])
    assert value is not None
    assert number == f"{value / SMALLEST.get(unit, 1.0):.{digits}f}"


def test_every_row_is_that_of_the_results():
    results = figures()
    rows = ROW.findall((ROOT / "docs/gpu.md").read_text(encoding="utf-8"))
    assert len(rows) == 12
    for key, ours, theirs, ratio in rows:
        name, _, depth = key.partition("_depth")
        ratio_key = f"{name}_ratio_vs_llamacpp" + (f"_depth{depth}" if depth else "")
        assert_shows(ours, results[key])
        assert_shows(theirs, results.get(f"llamacpp_{key}"))
        assert_shows(ratio, results.get(ratio_key))
