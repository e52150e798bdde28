"""Products with the matrices of a 27B hybrid, and of a small model."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from run import CACHE_BYTES, relative_error, time_us

from ragflash_kernels.backend import Backend
from ragflash_kernels.qmatmul import PackedMatrix, pack_matrix, unpack_matrix
from ragflash_kernels.qmatmul.activations import quantize_rows
from ragflash_kernels.qmatmul.launch import (
    multiply_into_splits,
    qmatmul_triton,
    quantize_rows_triton,
    sum_splits,
    unpack_gluon,
)
from tests.kernels.quantised import random_blocks

if TYPE_CHECKING:
    from run import Report

MATRICES = [
    ("Q4_K", 17408, 5120),
    ("Q4_K", 5120, 17408),
    ("Q4_K", 5120, 6144),
    ("Q6_K", 5120, 17408),
    ("Q5_K", 17408, 5120),
    ("Q6_K", 248320, 5120),
    ("Q8_0", 17408, 5120),
    ("Q4_0", 17408, 5120),
    ("Q5_0", 1536, 576),
    ("IQ4_XS", 17408, 5120),
]
SWEPT = [MATRICES[0], MATRICES[1], MATRICES[3]]
ROWS = (1, 8, 16, 24, 32)
SWEPT_ROWS = (1, 16, 24)
LARGEST_UNPACKED = 2**27  # values; a vocabulary's matrix is only ever multiplied by few rows


def bench_unpack(report: "Report", *, sweep: bool) -> None:
    """Time unpacking to bfloat16."""
    for name, rows, columns in MATRICES:
        if rows * columns > LARGEST_UNPACKED:
            continue
        blocks = random_blocks(name, rows, columns, device="cuda")
        weight = pack_matrix(blocks, block_format=name)
        outs = [torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        exact = unpack_matrix(weight, backend=Backend.REFERENCE)
        num_bytes = weight.records.numel() + 2 * outs[0].numel()
        for warps in (1, 2, 4, 8) if sweep else (4,):
            unpack_gluon(weight, outs[0], warps=warps)
            error = relative_error(outs[0], exact)
            us = time_us([partial(unpack_gluon, weight, out, warps=warps) for out in outs])
            report.line(f"unpack {name} {rows}x{columns}", us, num_bytes, error, warps=warps)


def bench_qmatmul(report: "Report", *, sweep: bool) -> None:
    """Time the product of quantised rows, without and with the sum over splits."""
    for name, rows, columns in SWEPT if sweep else MATRICES:
        blocks = random_blocks(name, rows, columns, device="cuda")
        weight = pack_matrix(blocks, block_format=name)
        copies = [weight] + [
            PackedMatrix(weight.records.clone(), name, rows, columns)
            for _ in range(CACHE_BYTES // weight.records.numel() + 1)
        ]
        dense = unpack_matrix(weight)
        for num_rows in SWEPT_ROWS if sweep else ROWS:
            _bench_rows(report, copies, dense, num_rows, sweep=sweep)


def _bench_rows(
    report: "Report",
    copies: list[PackedMatrix],
    dense: torch.Tensor,
    num_rows: int,
    *,
    sweep: bool,
) -> None:
    weight = copies[0]
    num_bytes = weight.records.numel()
    name = f"{weight.block_format} {weight.rows}x{weight.columns} M={num_rows}"
    x = torch.randn(num_rows, weight.columns, device="cuda")
    q, scales = quantize_rows(x)
    grid = (q.double().view(*scales.shape, -1) * scales.double()[..., None]).flatten(1)
    expected = torch.cat([grid @ part.double().t() for part in dense.split(2**14)], 1)
    buffers = quantize_rows_triton(x)
    for options in _options(sweep=sweep):
        product = partial(multiply_into_splits, buffers, num_rows, **options)
        eager = bool(options.get("eager"))
        error = relative_error(sum_splits(product(weight), weight.rows, eager=eager), expected)
        us = time_us([partial(product, w) for w in copies])
        report.line(name, us, num_bytes, error, what="product", **options)
        if not sweep:
            us = time_us([partial(_summed, product, w, eager=eager) for w in copies])
            report.line(name, us, num_bytes, error, what="summed", **options)
    if not sweep and num_rows in (1, 16):
        error = relative_error(qmatmul_triton(x, weight), expected)
        us = time_us([partial(qmatmul_triton, x, w) for w in copies], 5)
        report.line(name, us, num_bytes, error, backend="triton")


def _summed(
    product: Callable[[PackedMatrix], torch.Tensor], weight: PackedMatrix, *, eager: bool
) -> torch.Tensor:
    return sum_splits(product(weight), weight.rows, eager=eager)


def _options(*, sweep: bool) -> list[dict[str, object]]:
    if not sweep:
        return [{}, {"eager": True}]
    return [
        {"staged": staged, "eager": eager, "max_registers": limit}
        for staged, eager, limit in itertools.product((False, True), (False, True), (None, 128))
        if staged or limit is None
    ]
