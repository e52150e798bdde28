"""Measures at the start what steps cost, so that drafting begins with the right widths."""

import time

import torch

from ragflash.engine.placed import Placed
from ragflash.kvcache.allocator import pages_for
from ragflash.models.contract import ForwardBatch, GreedyModel, SequenceRows
from ragflash.speculative.costs import StepCosts

ROWS = (1, 2, 4, 8, 16, 21, 32)
LENGTHS = (0, 4096, 32_768, 131_072)
_CARD_RUNS, _HOST_RUNS = 3, 2
_PLAIN_STEPS = 16


def measure_step_costs(placed: Placed, *, most_rows: int) -> StepCosts:
    """Time steps of one sequence that nobody asked for; for the worker's thread, before it serves.

    Behind a length stands the same page again and again, so nothing but slot 0 and the first pages
    is overwritten, and these are nobody's yet.

    Args:
        placed: The model.
        most_rows: Of a step, the one before a draft included.
    """
    most_tokens = min(placed.model.context_tokens, placed.allocators.most_tokens)
    lengths = [length for length in LENGTHS if length + most_rows <= most_tokens] or [0]
    rows = sorted({*(rows for rows in ROWS if rows < most_rows), most_rows})
    runs = _HOST_RUNS if placed.device == "cpu" else _CARD_RUNS
    _time(placed, rows[-1], lengths[-1])  # what is made at the first use
    measured = {
        length: {num: min(_time(placed, num, length) for _ in range(runs)) for num in rows}
        for length in lengths
    }
    model, share = placed.model, None
    if isinstance(model, GreedyModel):
        alone_ms, ahead_ms = (_time_plain(model, placed, goes_on=ahead) for ahead in (False, True))
        share = min(1.0, ahead_ms / alone_ms)
    model.reset(0)
    return StepCosts(measured, share)


@torch.inference_mode()
def _time(placed: Placed, num_rows: int, length: int) -> float:
    """Return the milliseconds of a step of drafted rows, its choices included."""
    model = placed.model
    model.reset(0)
    batch = _batch(placed, num_rows, length)
    began_at = time.perf_counter()
    model.forward(batch, placed.pages).argmax(dim=-1).tolist()
    return 1000 * (time.perf_counter() - began_at)


@torch.inference_mode()
def _time_plain(model: GreedyModel, placed: Placed, *, goes_on: bool) -> float:
    """Return the milliseconds of a step of plain decoding, with the next one begun early or not."""
    model.reset(0)
    token, began_at = 0, 0.0
    for position in range(1, 2 + _PLAIN_STEPS):  # the first is begun by nobody
        rows = SequenceRows(0, 1, position, pages=(0,), logit_rows=(0,))
        batch = ForwardBatch(torch.tensor([token]), torch.tensor([position]), (rows,))
        (token,) = model.forward_greedy(batch, placed.pages, goes_on=goes_on)
        model.commit(0, (0,))
        began_at = began_at or time.perf_counter()
    return 1000 * (time.perf_counter() - began_at) / _PLAIN_STEPS


def _batch(placed: Placed, num_rows: int, length: int) -> ForwardBatch:
    grid = placed.allocators.grid
    num_packed = 0 if grid is None else grid.num_packed(length)
    num_exact = pages_for(length + num_rows) - num_packed
    rows = SequenceRows(
        slot=0,
        num_rows=num_rows,
        committed=length,
        pages=(0,) * num_exact,
        logit_rows=tuple(range(num_rows)),
        num_draft=num_rows - 1,
        packed_pages=(0,) * num_packed,
    )
    return ForwardBatch(
        torch.zeros(num_rows, dtype=torch.int64), torch.arange(length, length + num_rows), (rows,)
    )
