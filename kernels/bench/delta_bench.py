"""The gated delta rule with the heads of a 27B hybrid: 48 layers, one sequence."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from run import relative_error, time_us

from ragflash_kernels.gated_delta import DeltaStates, delta_commit, gated_norm
from ragflash_kernels.gated_delta.launch import delta_step_triton
from ragflash_kernels.gated_delta.prefill.launch import ChainOptions, delta_prefill_triton
from tests.kernels.delta_cases import REAL, Layer, int32, random_tree

if TYPE_CHECKING:
    from run import Report

LAYERS = 48
PROMPT_ROWS = 2048
ROWS = (1, 4, 16, 21, 32)
MEMORY_BYTES = REAL.value_heads * REAL.key_dim * REAL.value_dim * 4


def bench_gated_delta(report: "Report", *, sweep: bool) -> None:
    """Time steps of a layer, the commit of all, a prompt's rows in a layer, and the gated norm."""
    layer = Layer.random(REAL, "cuda")
    states = DeltaStates.allocate(REAL, layers=LAYERS, slots=1, device="cuda")
    states.memories.normal_()
    states.tails.normal_()
    for num_rows in ROWS:
        for shape in ((8, 1), (16, 1), (16, 2), (32, 4)) if sweep else ((8, 1),):
            _bench_step(report, layer, states, num_rows, shape)
    _bench_step(report, layer, states, 21, (8, 1), random_tree(21, 4))
    for count in (1, 6, 16):
        counts, slot = int32(count, device="cuda"), int32(0, device="cuda")
        us = time_us([partial(delta_commit, states, slot, counts)])
        report.line(f"commit {count} rows of all layers", us, 2 * LAYERS * MEMORY_BYTES, 0.0)
    _bench_norm(report)
    _bench_prefill(report, layer, sweep=sweep)


def _bench_step(
    report: "Report", layer: Layer, states: DeltaStates, num_rows: int, shape: tuple[int, int],
    tree: list[int] | None = None,
) -> None:  # fmt: skip
    """Time chains described by their parents, or a tree."""
    block, warps = shape
    columns = layer.columns(num_rows, parts=7)
    first_rows, slots = int32(0, num_rows, device="cuda"), int32(0, device="cuda")
    parents = int32(*(tree or range(-1, num_rows - 1)), device="cuda")
    for eager in (False, True):
        calls = [
            partial(
                delta_step_triton, *columns, **layer.weights, states=states.layer(index),
                first_rows=first_rows, slots=slots, parents=parents, eager=eager,
                value_block=block, warps=warps,
            )
            for index in range(LAYERS)
        ]  # fmt: skip
        found = calls[0]()
        start = states.memories[0, 0], states.tails[0, 0]
        expected = layer.by_tree(columns, parents.tolist(), *start)
        report.line(
            f"step of a layer, {num_rows} rows{' of a tree' if tree else ''}", time_us(calls),
            MEMORY_BYTES, relative_error(found, expected), eager=eager, block=block, warps=warps,
        )  # fmt: skip


def _bench_norm(report: "Report") -> None:
    for num_rows, parts, dtype in (
        (1, 7, torch.float32), (16, 7, torch.float32), (PROMPT_ROWS, 1, torch.bfloat16),
    ):  # fmt: skip
        gate = Layer.random(REAL, "cuda").columns(num_rows, parts=parts, dtype=dtype)[0]
        gate = type(gate)(gate.partials, 0, REAL.value_heads * REAL.value_dim)
        o = torch.randn(num_rows, REAL.value_heads, REAL.value_dim, device="cuda").to(dtype)
        weight = torch.rand(REAL.value_dim, device="cuda")
        quantized = dtype is torch.float32
        us = time_us([partial(gated_norm, o, gate, weight, eps=1e-6, quantized=quantized)] * 8)
        num_bytes = o.numel() * (o.element_size() * (1 + parts) + (1 if quantized else 2))
        report.line(f"gated norm, {num_rows} rows", us, num_bytes, 0.0)


def _bench_prefill(report: "Report", layer: Layer, *, sweep: bool) -> None:
    columns = layer.columns(PROMPT_ROWS, parts=1, dtype=torch.bfloat16)
    copies = [layer.states(slots=1, seed=seed) for seed in range(4)]
    start = copies[0].memories[0, 0].clone(), copies[0].tails[0, 0].clone()
    _, memory, _ = layer.by_rows(columns, *start)
    num_bytes = PROMPT_ROWS * (REAL.channels + REAL.value_heads * REAL.value_dim) * 2
    shapes = [(64, 8, 1), (32, 2, 1)]
    if sweep:
        shapes += [(64, 8, 2), (64, 4, 1), (128, 8, 1), (16, 2, 1), (32, 2, 2)]
    chains = [ChainOptions(*shape) for shape in shapes]
    for options in chains:
        calls = [
            partial(
                delta_prefill_triton, *columns, **layer.weights, states=states.layer(0), slot=0,
                keep=True, out_dtype=torch.bfloat16, options=options,
            )
            for states in copies
        ]  # fmt: skip
        copies[0].memories[0, 0], copies[0].tails[0, 0] = start
        calls[0]()
        error = relative_error(copies[0].memories[0, 0], memory)
        report.line(
            f"{PROMPT_ROWS} rows of a layer", time_us(calls), num_bytes, error,
            block=options.value_block, warps=options.warps, stages=options.stages,
        )  # fmt: skip
        for name, us in _kernel_times(calls[0]).items():
            report.line(f"  {name}", us, num_bytes, error)


def _kernel_times(call: partial[torch.Tensor]) -> dict[str, float]:
    """Return the time of each of our kernels in a call, µs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return {e.key: e.device_time_total for e in events if e.key.endswith("_chunks_kernel")}
