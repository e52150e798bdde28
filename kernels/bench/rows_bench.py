"""The row-wise kernels between the matrices of a 27B hybrid: few rows from parts, many from one."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from run import relative_error, time_us

from ragflash_kernels.columns import Columns
from ragflash_kernels.embedding import gather_rows
from ragflash_kernels.gated_ffn import gated
from ragflash_kernels.qmatmul import ActivationBuffers, multiply, quantize
from ragflash_kernels.rms_norm import add_norm
from tests.kernels.quantised import random_blocks

if TYPE_CHECKING:
    from run import Report

HIDDEN, FFN, VOCABULARY = 5120, 17408, 248320
FEW_ROWS = (1, 16, 21)
MANY_ROWS = 2048
CALLS = 8  # in a graph, so that one kernel's start overlaps another's end


def bench_rows(report: "Report", *, sweep: bool) -> None:
    """Time what stands between products, whose parts are in the cache as they are in a step."""
    for rows in FEW_ROWS:
        for eager in (False, True):
            _bench_norm(report, rows, parts=12, eager=eager)
            _bench_gate(report, rows, parts=7, eager=eager)
            _bench_quantize(report, rows, eager=eager)
            for dtype in (torch.float32, torch.bfloat16):
                _bench_dense(report, rows, 96, dtype, eager=eager)
    _bench_dense(report, 16, FFN, torch.bfloat16, eager=False)
    _bench_norm(report, MANY_ROWS, parts=1, eager=False)
    _bench_gate(report, MANY_ROWS, parts=1, eager=False)
    _bench_embedding(report)


def _line(
    report: "Report",
    name: str,
    call: Callable[[], ActivationBuffers | torch.Tensor],
    expected: torch.Tensor,
    num_bytes: int,
    **options: object,
) -> None:
    found = call()
    if isinstance(found, ActivationBuffers):
        found = found.to_rows(*expected.shape)
    elif found.dim() > expected.dim():
        found = found.sum(0)
    error = relative_error(found, expected)
    report.line(name, time_us([call] * CALLS), num_bytes, error, **options)


def _bench_norm(report: "Report", rows: int, *, parts: int, eager: bool) -> None:
    few = rows <= max(FEW_ROWS)
    partials = torch.randn(parts, rows, HIDDEN, device="cuda")
    delta = Columns.whole(partials if few else partials.bfloat16())
    residual, weight = torch.randn(rows, HIDDEN, device="cuda"), torch.rand(HIDDEN, device="cuda")
    total = residual.double() + delta.partials.double().sum(0)
    expected = total * (total.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight
    call = partial(add_norm, delta, residual, weight, eps=1e-6, quantized=few, eager=eager)
    num_bytes = delta.partials.numel() * delta.partials.element_size() + residual.numel() * 9
    _line(report, f"norm of {parts} parts, {rows} rows", call, expected, num_bytes, eager=eager)


def _bench_gate(report: "Report", rows: int, *, parts: int, eager: bool) -> None:
    few = rows <= max(FEW_ROWS)
    product = torch.randn(parts, rows, 2 * FFN, device="cuda")
    product = product if few else product.bfloat16()
    gate, up = Columns.whole(product).split(FFN, FFN)
    expected = torch.nn.functional.silu(gate.sum().double()) * up.sum().double()
    call = partial(gated, gate, up, "silu", quantized=few, eager=eager)
    num_bytes = product.numel() * product.element_size() + rows * FFN * (1 if few else 2)
    _line(report, f"gate of {parts} parts, {rows} rows", call, expected, num_bytes, eager=eager)


def _bench_quantize(report: "Report", rows: int, *, eager: bool) -> None:
    x = torch.randn(rows, HIDDEN, device="cuda")
    call = partial(quantize, x, eager=eager)
    _line(report, f"quantise {rows} rows", call, x, x.numel() * 5, eager=eager)


def _bench_dense(
    report: "Report", rows: int, out_features: int, dtype: torch.dtype, *, eager: bool
) -> None:
    weight = torch.randn(out_features, HIDDEN, device="cuda").to(dtype)
    x = quantize(torch.randn(rows, HIDDEN, device="cuda"))
    expected = x.to_rows(rows, HIDDEN).double() @ weight.double().t()
    call = partial(multiply, x, rows, weight, eager=eager)
    num_bytes = weight.numel() * weight.element_size()
    name = f"{dtype} {out_features}x{HIDDEN} M={rows}"
    _line(report, name, call, expected, num_bytes, eager=eager)


def _bench_embedding(report: "Report") -> None:
    on_card = random_blocks("Q4_K", VOCABULARY // 8, HIDDEN, device="cuda")
    for where, table in (("card", on_card), ("host", on_card.cpu().pin_memory())):
        for rows in (1, MANY_ROWS):
            ids = torch.randint(0, len(table), (rows,), device="cuda")
            expected = gather_rows(on_card, ids, "Q4_K")
            call = partial(gather_rows, table, ids, "Q4_K")
            num_bytes = rows * (table.shape[1] + 4 * HIDDEN)
            _line(report, f"{rows} token vectors", call, expected, num_bytes, table=where)
