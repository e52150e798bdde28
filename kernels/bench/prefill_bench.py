"""Attention of a chunk of 2,048 rows over long history, with the heads of a 27B hybrid.

History is as the model keeps it: with packed pages, the first page and the 2,048 tokens before the
chunk are exact. Times are of calls in a row, not of a graph, as a chunk is worked on in the model.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from run import relative_error

from ragflash_kernels.kv_codec import KvFormat, encode_pages, page_layout, rotate
from ragflash_kernels.prefill_attention import (
    PackedHistory,
    PrefillBackend,
    PrefillWorkspace,
    prefill_attention,
)
from ragflash_kernels.prefill_attention.backends import attend_torch, works
from ragflash_kernels.prefill_attention.launch import attend_triton
from ragflash_kernels.prefill_attention.unpack.launch import unpack_pages

if TYPE_CHECKING:
    from run import Report

ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 2048, 24, 4, 256, 256
EXACT_BEFORE = PAGE + 2048  # where older tokens are packed
SCALE = HEAD_DIM**-0.5


def time_calls_us(call: Callable[[], object], samples: int = 5, calls: int = 3) -> float:
    """Return the median over samples of the time of a call among several in a row, in µs."""
    call()
    found = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(found)


def bench_prefill_attention(report: "Report", *, sweep: bool) -> None:
    """Time whole calls by every backend that works here, then their parts."""
    device = torch.device("cuda", torch.cuda.current_device())
    backends = [PrefillBackend.TRITON]
    backends += [
        backend
        for backend in (PrefillBackend.FLASH, PrefillBackend.CUDNN)
        if works(backend, device, HEAD_DIM)
    ]
    segments = (8192, 16384, 32768, 65536) if sweep else (16384, 32768)
    _bench_history(report, backends, ROWS, 0, KvFormat.F16, segments[:1])
    for history in (32768, 131072):
        for kv_format in (KvFormat.F16, KvFormat.TQ3_0):
            _bench_history(report, backends, ROWS, history, kv_format, segments)
    _bench_history(report, backends, 200, 131072, KvFormat.TQ3_0, segments[-1:])
    for backend in backends:
        _bench_pieces(report, backend)
    for kv_format in (KvFormat.F16, KvFormat.TQ4, KvFormat.Q8_0, KvFormat.TQ3_0):
        _bench_unpacking(report, kv_format, values=False)
    _bench_unpacking(report, KvFormat.TQ3_0, values=True)
    x = torch.randn(ROWS, HEADS, HEAD_DIM, device="cuda")
    report.line("rotation", time_calls_us(partial(rotate, x)), 2 * x.nbytes, 0.0)


def _bench_history(
    report: "Report",
    backends: list[PrefillBackend],
    rows: int,
    history: int,
    kv_format: KvFormat,
    segments: tuple[int, ...],
) -> None:
    q = torch.randn(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    packed, exact_before = None, history
    if kv_format is not KvFormat.F16:
        exact_before = EXACT_BEFORE
        pages = (history - EXACT_BEFORE) // PAGE
        stored = [
            torch.cat(
                [
                    encode_pages(_random_pages(part), kv_format, values=values)
                    for part in _parts(pages)
                ]
            )
            for values in (False, True)
        ]
        packed = PackedHistory(*stored, _shuffled(pages), kv_format, kv_format)
    exact_pages = _shuffled(-(-(exact_before + rows) // PAGE))
    keys, values = (_random_pages(len(exact_pages)) for _ in range(2))
    call = partial(
        prefill_attention, q, keys, values, exact_pages, exact_before, packed, scale=SCALE
    )
    expected = call(backend=PrefillBackend.REFERENCE)
    flops = 4 * HEADS * HEAD_DIM * rows * (history + rows / 2)
    for backend in backends:
        for segment in segments:
            workspace = PrefillWorkspace(
                max_rows=rows, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                device="cuda", segment_tokens=segment,
            )  # fmt: skip
            run = partial(call, workspace=workspace, backend=backend)
            error = relative_error(run(), expected)
            us = time_calls_us(run)
            kv_bytes = sum(
                2 * tokens // PAGE * KV_HEADS * page_layout(stored_as, PAGE, HEAD_DIM).size
                for tokens, stored_as in (
                    (exact_before + rows, KvFormat.F16),
                    (history - exact_before, kv_format),
                )
            )
            report.line(
                f"{backend} {kv_format}, {rows} after {history}", us, 2 * q.nbytes + kv_bytes,
                error, segment=segment, tflops=round(flops / us / 1e6),
            )  # fmt: skip


def _bench_pieces(report: "Report", backend: PrefillBackend) -> None:
    """Time attention alone; of cuDNN, the first call of a shape makes a plan."""
    q = torch.randn(ROWS, HEADS, HEAD_DIM, device="cuda").half()
    for tokens, causal in ((256, False), (1792, False), (16384, False), (ROWS, True)):
        keys, values = (
            torch.randn(KV_HEADS, tokens, HEAD_DIM, device="cuda").half() for _ in range(2)
        )
        if backend is PrefillBackend.TRITON:
            call = partial(
                attend_triton, q, keys, values, SCALE, first=0 if causal else None, page_tokens=PAGE
            )
        else:
            call = partial(attend_torch, backend, q, keys, values, SCALE, causal=causal)
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first_ms = (time.perf_counter() - start) * 1e3
        us = time_calls_us(call)
        flops = 4 * HEADS * HEAD_DIM * ROWS * (tokens / 2 if causal else tokens)
        report.line(
            f"{backend} alone, {tokens} {'causal' if causal else 'tokens'}", us,
            2 * q.nbytes + 2 * keys.nbytes, 0.0, tflops=round(flops / us / 1e6),
            first_call_ms=round(first_ms, 1),
        )  # fmt: skip


def _bench_unpacking(report: "Report", kv_format: KvFormat, *, values: bool) -> None:
    """Time keys or values of 32,768 tokens, with what is written more than the cache holds."""
    pages = _random_pages(128)
    stored = pages if kv_format is KvFormat.F16 else encode_pages(pages, kv_format, values=values)
    listed = _shuffled(128)
    out = torch.empty(KV_HEADS, 128 * PAGE, HEAD_DIM, dtype=torch.float16, device="cuda")
    call = partial(unpack_pages, stored, listed, kv_format, PAGE, out, values=values)
    us = time_calls_us(call, calls=20)
    name = f"unpack {kv_format} {'values' if values else 'keys'}"
    report.line(name, us, stored.nbytes + out.nbytes, 0.0)


def _random_pages(pages: int) -> torch.Tensor:
    return torch.randn(pages, KV_HEADS, PAGE, HEAD_DIM, device="cuda").half()


def _parts(pages: int) -> list[int]:
    """Cut a number of pages, so that encoding them needs little memory."""
    return [min(64, pages - at) for at in range(0, pages, 64)]


def _shuffled(pages: int) -> torch.Tensor:
    return torch.randperm(pages, device="cuda").int()
