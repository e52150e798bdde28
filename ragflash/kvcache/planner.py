"""What a model takes of a card's memory, before anything is loaded.

Weights, keys and values and recurrent state are exact; work space, CUDA graphs and the context are
allowances, measured on one card and named so in the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.kvcache.formats import KV_FORMATS, KVFormatName

GRID_TOKENS = 1024  # rows read the last two stretches of this length in f16
CONTEXT_BYTES = 757 << 20  # a CUDA context with its modules
GRAPHS_BYTES = 300 << 20
SPARE_BYTES = 1 << 30  # left free for the driver and the desktop
PREFILL_ROWS = 2048


class HeadShape(Protocol):
    """Keys of a layer."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of K, and of V."""

    @property
    def head_dim(self) -> int:
        """Values a head."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a file says of a model's size.

    Attributes:
        name: Of the file or the shape.
        context_tokens: Longest sequence.
        kv_layers: Of each layer with keys and values.
        state_bytes: Recurrent state of a sequence.
        tape_bytes: What a drafted row keeps until it is verified.
        device_weight_bytes: Of all tensors that every token reads.
        host_weight_bytes: Of the embedding, when it is read by row only.
        largest_matrix_values: Of the largest matrix that prefill unpacks.
        hidden_size: Values of a row.
        vocab_size: Width of the logits.
    """

    name: str
    context_tokens: int
    kv_layers: Sequence[HeadShape]
    state_bytes: int
    tape_bytes: int
    device_weight_bytes: int
    host_weight_bytes: int
    largest_matrix_values: int
    hidden_size: int
    vocab_size: int

    @property
    def kv_values(self) -> int:
        """Numbers that a token leaves in all layers, K and V together."""
        return sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.kv_layers)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is asked of a card.

    Attributes:
        vram_bytes: Of the card, or what is free of it.
        context_tokens: That all slots and stored documents share.
        kv_format: Of keys and values beyond the newest.
        slots: Sequences that are decoded together.
        verify_rows: Most rows of a sequence in a verification, 1 without drafting.
    """

    vram_bytes: int
    context_tokens: int
    kv_format: KVFormatName = "tq3_0"
    slots: int = 1
    verify_rows: int = 21


@dataclass(frozen=True, slots=True)
class PlanPart:
    """One line of the table; `is_estimate` marks an allowance."""

    name: str
    num_bytes: int
    is_estimate: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the options take, part by part."""

    shape: ModelShape
    options: PlanOptions
    parts: tuple[PlanPart, ...]

    @property
    def total_bytes(self) -> int:
        """Of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def left_bytes(self) -> int:
        """What stays free; negative when it does not fit."""
        return self.options.vram_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """Whether all parts fit, the spare included."""
        return self.left_bytes >= 0


def kv_bytes(shape: ModelShape, num_tokens: int, kv_format: KVFormatName) -> int:
    """Return what keys and values of so many tokens take."""
    return num_tokens * KV_FORMATS[kv_format].stored_bytes(shape.kv_values)


def plan_memory(shape: ModelShape, options: PlanOptions) -> MemoryPlan:
    """Add up what the options take."""
    kv_format = options.kv_format
    padding = -options.context_tokens % PAGE_TOKENS
    newest = min(options.context_tokens + padding, 2 * GRID_TOKENS + PAGE_TOKENS)
    work_values = shape.largest_matrix_values + 6 * PREFILL_ROWS * shape.hidden_size
    logits = options.slots * options.verify_rows * shape.vocab_size * 4
    parts = [
        PlanPart("weights", shape.device_weight_bytes),
        PlanPart(
            f"keys and values, {kv_format}", kv_bytes(shape, options.context_tokens, kv_format)
        ),
        PlanPart("rest of their last page", kv_bytes(shape, padding, kv_format)),
        PlanPart("recurrent state", options.slots * shape.state_bytes),
        PlanPart("drafted rows", options.slots * (options.verify_rows - 1) * shape.tape_bytes),
        PlanPart("work space", 2 * work_values + logits, is_estimate=True),
        PlanPart("CUDA graphs", GRAPHS_BYTES, is_estimate=True),
        PlanPart("CUDA context", CONTEXT_BYTES, is_estimate=True),
        PlanPart("left free", SPARE_BYTES, is_estimate=True),
    ]
    if kv_format != "f16":
        newest_bytes = options.slots * kv_bytes(shape, newest, "f16")
        parts.insert(3, PlanPart("newest keys and values, f16", newest_bytes))
    kept = tuple(part for part in parts if part.num_bytes)
    return MemoryPlan(shape, options, kept)


def most_context_tokens(shape: ModelShape, options: PlanOptions) -> int:
    """Return the longest context that fits, whole pages, 0 if none; at most the model's own."""
    low, high = 0, -(-shape.context_tokens // PAGE_TOKENS)
    while low < high:
        middle = (low + high + 1) // 2
        tried = replace(options, context_tokens=middle * PAGE_TOKENS)
        if plan_memory(shape, tried).fits:
            low = middle
        else:
            high = middle - 1
    return min(low * PAGE_TOKENS, shape.context_tokens)


def alternatives(shape: ModelShape, options: PlanOptions) -> list[tuple[str, int]]:
    """Name each change of an option, and the context that fits with it."""
    changes: list[tuple[str, PlanOptions]] = [
        (f"--kv {name}", replace(options, kv_format=name))
        for name in KV_FORMATS
        if name != options.kv_format
    ]
    changes.append((f"--slots {options.slots + 1}", replace(options, slots=options.slots + 1)))
    if options.verify_rows > 1:
        changes.append(("--verify-rows 1", replace(options, verify_rows=1)))
    return [(name, most_context_tokens(shape, changed)) for name, changed in changes]
