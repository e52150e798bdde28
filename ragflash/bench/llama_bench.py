"""What llama.cpp reaches on a card: measured once, or by `llama-bench` in the same call."""

import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragflash.errors import EngineError

PROGRAM = "llama-bench"
_LONGEST_S = 1200

# Beside the figures of `bench gpu` by name, for the files below.
MEASURED: Mapping[str, float] = {
    "decode_tok_s_depth0": 81.7,
    "decode_tok_s_depth131072": 44.7,
    "verify16_ms_depth0": 24.0,
    "verify16_ms_depth131072": 33.9,
    "prefill_tok_s_8192_depth0": 2458.0,
    "prefill_tok_s_8192_depth131072": 1560.0,
    "ttft_138696_s": 73.1,
    "peak_bytes_at_138696": 21_223 * 2.0**20,
    "small_decode_tok_s": 932.0,
    "small_prefill_tok_s_512": 54_516.0,
}
MEASURED_HOW: Mapping[str, str] = {
    "version": "llama.cpp 0c1e57098 (llama-cpp-python 0.3.36), CUDA 13.0, flash attention",
    "hardware": "NVIDIA H200, driver 580.159.04",
    "date": "2026-11-30",
    "model": "qwen35-27b with random weights, and SmolLM2-135M Q4_1 for `small_` figures",
    "kv_format": "f16 at depth 0 and for prefill; at depth 131072 and for the whole prompt q8_0, "
    "since f16 does not fit 24 GB there (with f16 decoding reaches 67.4); the best of several for "
    "16 rows at depth 131072",
}
CARD = "H200"
ARCHITECTURE = "qwen35"


def is_installed() -> bool:
    """Whether there is a program to measure beside."""
    return shutil.which(PROGRAM) is not None


def measure(
    path: Path, *, kv_format: str, depths: Sequence[int], prefill: int, decode: int, runs: int
) -> dict[str, list[float]]:
    """Run llama.cpp's own benchmark on a file, with all layers on the card.

    Returns:
        Readings by the names that `bench gpu` gives them.

    Raises:
        EngineError: It failed, or said what is not understood.
    """
    command = [
        *(PROGRAM, "-m", str(path), "-ngl", "99", "-fa", "1", "-o", "json", "-r", str(runs)),
        *("-ctk", kv_format, "-ctv", kv_format, "-d", ",".join(map(str, depths))),
        *("-p", f"16,{prefill}", "-n", str(decode)),
    ]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_S, check=True
        )
        return parse(json.loads(run.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise EngineError(f"{PROGRAM} could not be used: {error}") from error


def parse(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Read what `llama-bench -o json` prints."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for entry in entries:
        prompt, depth, readings = entry["n_prompt"], entry["n_depth"], entry["samples_ts"]
        if entry["n_gen"] and not prompt:
            found[f"decode_tok_s_depth{depth}"] += readings
        elif prompt == 16:
            found[f"verify16_ms_depth{depth}"] += [16_000 / rate for rate in readings]
        elif prompt:
            found[f"prefill_tok_s_{prompt}_depth{depth}"] += readings
    return dict(found)
