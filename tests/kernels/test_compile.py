"""Kernels fit every supported card: no spilled registers, no more shared memory than it has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragflash_kernels.kv_codec import KvFormat
from ragflash_kernels.qmatmul.formats import RECORD_FORMATS
from ragflash_kernels.quant_layout import BLOCK_FORMATS

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 86, 89, 90, 120)
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # of a program
SMALLEST_SHARED_BYTES = 99 * 1024
ATTENTION = "tests.kernels.attention_compiling"
ROWS = (1, 8, 16, 24, 32)
# By rows or tiles, the last parameter of a kernel: more warps on an SM are worth a few spilled
# registers, and 8 to 24 bytes the assembler itself gives up for one more program there.
STACK_BYTES = {
    "qmatmul:1": 16, "qmatmul:8": 24, "qmatmul:16": 8, "qmatmul:24": 8, "qmatmul:32": 128,
    "attend_tq3:2": 16, "attend_tq3:3": 64, "attend_tq3:4": 80, "attend_tq3:6": 176,
    "attend_tq3:8": 88, "attend_tq3:12": 192,  # most on sm_120
    "attend:96": 16,  # tq3_0 of 128 values on sm_120, where `attend_tq3` is what runs
}  # fmt: skip


def compile_in_a_child(kernels: list[str], module: str = "tests.kernels.compiling") -> list[dict]:
    """The interpreter is chosen when triton is imported, so this process cannot compile."""
    pytest.importorskip("triton")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    result = subprocess.run(
        [sys.executable, "-m", module, *kernels],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def allowed_shared(kernel: str) -> int:
    return SHARED_BYTES.get(int(kernel.rsplit(":", maxsplit=1)[-1]), SMALLEST_SHARED_BYTES)


def allowed_stack(kernel: str) -> int:
    parts = kernel.split(":")
    return STACK_BYTES.get(f"{parts[0]}:{parts[-2]}", 0)


def check(kernels: list[str], **options: str) -> None:
    found = compile_in_a_child(kernels, **options)
    assert [entry["kernel"] for entry in found] == kernels
    assert [e["kernel"] for e in found if e["shared"] > allowed_shared(e["kernel"])] == []
    spilled = [entry for entry in found if entry["stack"] > allowed_stack(entry["kernel"])]
    assert spilled == []


def test_a_kernel_fits_the_smallest_card():
    check(["qmatmul:Q8_0:8:86"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_products_fit_every_card(sm):
    check([f"qmatmul:{name}:{rows}:{sm}" for name in RECORD_FORMATS for rows in ROWS])
    if sm == 90:  # what `pick_staging` may choose
        check([f"qmatmul_staged:{name}:{rows}:{sm}" for name in RECORD_FORMATS for rows in (1, 16)])
    check([f"qmatmul_plain:{name}:{rows}:{sm}" for name in RECORD_FORMATS for rows in (16, 32)])
    check([f"dense:{dtype}:{rows}:{sm}" for dtype in ("fp32", "fp16", "bf16") for rows in (16, 32)])
    check([f"unpack:{name}:bf16:{sm}" for name in RECORD_FORMATS])
    check([f"unpack_gluon:{name}:{d}:{sm}" for name in RECORD_FORMATS for d in ("bf16", "fp16")])
    check([f"{name}:{kind}:{sm}" for name in ("add_norm", "gated") for kind in ("grid", "rows")])
    check([f"{name}:{sm}" for name in ("add_parts", "norm_parts")])
    check([f"quantize:{dtype}:{sm}" for dtype in ("fp32", "fp16", "bf16")])
    check([f"gather_rows:{name}:{sm}" for name in BLOCK_FORMATS])
    check([f"move_tokens:fp16:{sm}"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_codecs_fit_every_card(sm):
    formats = [kv_format for kv_format in KvFormat if kv_format is not KvFormat.F16]
    check([f"encode:{kv_format}:{dim}:{sm}" for kv_format in formats for dim in (64, 256)])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_attention_fits_every_card(sm):
    check([f"largest:{sm}"])
    kernels = [
        f"attention_inputs:{dtype}:{dim}:{sm}" for dtype in ("fp32", "bf16") for dim in (64, 256)
    ]
    kernels += [f"quantize_queries:{dim}:{sm}" for dim in (64, 128, 256)]
    kernels += [
        f"attend:{kv_format}:{dim}:{query_rows}:{sm}"
        for kv_format in KvFormat
        for dim in (64, 128, 256)
        for query_rows in ((6, 24, 96) if kv_format is KvFormat.F16 else (96,))
    ]
    kernels += [f"merge_parts:{kind}:{dim}:{sm}" for kind in ("grid", "rows") for dim in (64, 256)]
    check(kernels, module=ATTENTION)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_over_tq3_fits_every_card(dim, sm):
    kernels = [f"attend_tq3:{dim}:{tiles}:{sm}" for tiles in (1, 2, 3, 4, 6, 8, 12)]
    check(kernels, module=ATTENTION)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_attention_of_many_rows_fits_every_card(sm):
    masks = ("none", "causal", "window")
    kernels = [f"attend_many:{dim}:{mask}:{sm}" for dim in (64, 128, 256) for mask in masks]
    kernels += [
        f"chunk_attention:{dim}:{mask}:{query_rows}:{sm}"
        for dim in (64, 128, 256)
        for mask in masks[1:]
        for query_rows in (4096, 65536)
    ]
    kernels += [
        f"unpack_pages:{kv_format}:{dim}:{which}:{sm}"
        for kv_format in KvFormat
        for dim in (64, 256)
        for which in ("keys", "values")
        if kv_format is not KvFormat.F16
    ]
    check(kernels, module=ATTENTION)
