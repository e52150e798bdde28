"""What docs/gpu.md and the shipped table say of formats is what docs/results holds."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODELS = {"SmolLM2-135M": "kv_smollm2.json", "Gemma 3 270M": "kv_gemma3.json"}
ROW = re.compile(
    r"^\| ([^|]+) \| ([\d,]+) \| `(\w+)` \| ([\d.]+) of ([\d.]+) \| ([\d.]+) \| ([\d.]+) "
    r"\| (yes|no) \|$",
    re.MULTILINE,
)


def results(name):
    return json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))


def test_every_row_is_that_of_the_results():
    shown = ROW.findall((ROOT / "docs/gpu.md").read_text(encoding="utf-8"))
    expected = [
        (
            model,
            f"{row['context_tokens']:,}",
            row["kv_format"],
            f"{100 * row['copied']:.1f}",
            f"{100 * row['copied_exact']:.1f}",
            f"{row['mean_kl']:.4f}",
            f"{row['tail_kl']:.3f}",
            "yes" if row["passes"] else "no",
        )
        for model, name in MODELS.items()
        for row in results(name)["rows"]
    ]
    assert len(expected) == 16
    assert shown == expected


def test_the_shipped_table_has_what_was_best():
    path = ROOT / "ragflash/models/known_formats.json"
    shipped = json.loads(path.read_text(encoding="utf-8"))
    assert shipped == {
        result["sha256"]: {"model": result["model"], "kv_format": result["best"]}
        for result in map(results, MODELS.values())
    }


def test_what_passes_copies_as_much_as_f16():
    for name in MODELS.values():
        for row in results(name)["rows"]:
            copies = row["copied"] >= row["copied_exact"] - 0.02
            assert row["passes"] == (copies and row["mean_kl"] <= 0.05)
