"""Captured launches, one graph for each kind of step."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

ROW_COUNTS = (1, 2, 4, 8, 16, 21, 32)

Kind = TypeVar("Kind", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StepKind:
    """What the launches of a step of few rows depend on.

    Attributes:
        num_rows: Rows, padding included.
        has_packed: Whether packed pages are attended to; else nobody has any.
    """

    num_rows: int
    has_packed: bool


def step_kinds(row_counts: Sequence[int], *, may_have_packed: bool) -> list[StepKind]:
    """Return all kinds of steps of these numbers of rows, the largest first."""
    forms = (True, False) if may_have_packed else (False,)
    return [StepKind(count, form) for count in sorted(row_counts, reverse=True) for form in forms]


class GraphMemory:
    """Memory that graphs share: what one has computed, another may overwrite."""

    def __init__(self, device: torch.device) -> None:
        # torch names the type of a pool for itself alone
        self.pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class StepGraphs(Generic[Kind, Result]):
    """Runs `step(kind)`; on a card by replaying what was captured of it.

    Args:
        step: Launches kernels only, the same whatever the tables hold, and returns tensors.
        device: Where; on a CPU steps are simply run.
        memory: Of these graphs, and of others that never run at the same time.
    """

    def __init__(
        self, step: Callable[[Kind], Result], device: torch.device, memory: GraphMemory
    ) -> None:
        self._step = step
        self._device = device
        self._memory = memory
        self._graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, Result]] = {}

    def capture(self, kinds: Sequence[Kind]) -> None:
        """Capture steps of so many kinds: where the largest come first, others use their memory."""
        if self._device.type != "cuda":
            return
        for kind in kinds:
            self._capture(kind)

    def __call__(self, kind: Kind) -> Result:
        """Run a step; the result is overwritten by the next one."""
        if self._device.type != "cuda":
            return self._step(kind)
        graph, result = self._graphs[kind]
        graph.replay()
        return result

    def _capture(self, kind: Kind) -> None:
        # A capture cannot compile kernels. On a stream of its own this would cost a work space of
        # cuBLAS for each.
        self._step(kind)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory.pool):
            result = self._step(kind)
        self._graphs[kind] = (graph, result)
