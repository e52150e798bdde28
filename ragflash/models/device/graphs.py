"""Captured launches of a step, one graph for each number of rows."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

ROW_COUNTS = (1, 2, 4, 8, 16, 21, 32)

Result = TypeVar("Result")


class GraphMemory:
    """Memory that graphs share: what one has computed, another may overwrite."""

    def __init__(self, device: torch.device) -> None:
        # torch names the type of a pool for itself alone
        self.pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class StepGraphs(Generic[Result]):
    """Runs `step(num_rows)`; on a card by replaying what was captured of it.

    Args:
        step: Launches kernels only, the same whatever the tables hold, and returns tensors.
        device: Where; on a CPU steps are simply run.
        memory: Of these graphs, and of others that never run at the same time.
    """

    def __init__(
        self, step: Callable[[int], Result], device: torch.device, memory: GraphMemory
    ) -> None:
        self._step = step
        self._device = device
        self._memory = memory
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Result]] = {}

    def capture(self, row_counts: Sequence[int] = ROW_COUNTS) -> None:
        """Capture steps of so many rows, the largest first: smaller ones use its memory."""
        if self._device.type != "cuda":
            return
        for num_rows in sorted(row_counts, reverse=True):
            self._capture(num_rows)

    def __call__(self, num_rows: int) -> Result:
        """Run a step; the result is overwritten by the next one."""
        if self._device.type != "cuda":
            return self._step(num_rows)
        graph, result = self._graphs[num_rows]
        graph.replay()
        return result

    def _capture(self, num_rows: int) -> None:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step(num_rows)  # compiles kernels, which a capture cannot
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory.pool):
            result = self._step(num_rows)
        self._graphs[num_rows] = (graph, result)
