"""What a model takes of a card's memory, before anything is loaded.

Weights, pages, recurrent state and the tape are exact; work space, CUDA graphs and the context are
allowances, and named so in the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ragflash.errors import DeviceMemoryShort
from ragflash.kvcache.allocator import PAGE_TOKENS, pages_for
from ragflash.kvcache.formats import KV_FORMATS, KVFormatName

GRID_TOKENS = 2048  # a row reads the first page and the last two stretches of this length in f16
NEWEST_PAGES = 1 + 2 * GRID_TOKENS // PAGE_TOKENS
FEW_ROWS = 32  # most rows of a step that multiplies packed matrices
PREFILL_ROWS = 2048
HISTORY_TOKENS = 16_384  # of a layer that prefill unpacks at a time
CONTEXT_BYTES = 757 << 20  # a CUDA context with its modules
GRAPHS_BYTES = 300 << 20
CHUNK_ROWS = (64, 128, 256, 512, 1024, PREFILL_ROWS)  # that chunks of a prompt are padded to
# Rows times values of the largest matrices; with more, a card works for longer than launches take.
MOST_CAPTURED_WORK = 20_000_000_000
SPARE_BYTES = 1 << 30  # left free for the driver and the desktop
RING_BYTES = 128 << 20  # of the host, pinned: what stored prompts go through
SPARE_STATES = 2  # pinned for the first prompt that is read back: its rules, and its document

_GIB = 1 << 30


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
        tape_bytes: What a row keeps until it is committed.
        file_bytes: Of all tensors, as they are stored.
        device_weight_bytes: On the card, repacked, of all tensors that every token reads.
        host_weight_bytes: Of embeddings that are read by row, in the computer's own memory.
        largest_group_values: Of the matrices of one input that prefill unpacks together.
        widest_group: Output values of such matrices.
        query_values: Of a row in the layer with the most.
        hidden_size: Values of a row.
        vocab_size: Width of the logits.
        has_mtp: Whether it has a block of multi-token prediction.
    """

    name: str
    context_tokens: int
    kv_layers: Sequence[HeadShape]
    state_bytes: int
    tape_bytes: int
    file_bytes: int
    device_weight_bytes: int
    host_weight_bytes: int
    largest_group_values: int
    widest_group: int
    query_values: int
    hidden_size: int
    vocab_size: int
    has_mtp: bool = False

    @property
    def kv_values(self) -> int:
        """Numbers that a token leaves in all layers, K and V together."""
        return sum(map(_kv_values, self.kv_layers))


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a drafter's file says of its size.

    Attributes:
        weight_bytes: On the card, repacked.
        ring_bytes: Keys and values of the newest tokens of a sequence.
        tap_layers: Layers of the model whose rows it reads.
        largest_values: Of the largest matrix that rows of a prompt multiply with.
        block_rows: Rows of a draft.
    """

    weight_bytes: int
    ring_bytes: int
    tap_layers: tuple[int, ...]
    largest_values: int
    block_rows: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is asked of a card.

    Attributes:
        vram_bytes: Of the card, or what is free of it.
        context_tokens: That all slots and remembered documents share.
        kv_format: Of keys and values beyond the newest.
        slots: Sequences that are decoded together.
        documents: Remembered prompts that can be continued at once: each keeps its newest pages
            in f16; recurrent states of documents are in the computer's own memory.
        drafter: Beside the model; `None` for none.
        mtp: Whether the model's own block of multi-token prediction drafts, if it has one.
    """

    vram_bytes: int
    context_tokens: int
    kv_format: KVFormatName = "tq3_0"
    slots: int = 1
    documents: int = 2
    drafter: DrafterShape | None = None
    mtp: bool = True


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

    @property
    def exact_pages(self) -> int:
        """Pages in f16."""
        return exact_pages(self.options)

    @property
    def packed_pages(self) -> int:
        """Pages in the format of the plan; none for f16."""
        is_exact = self.options.kv_format == "f16"
        return 0 if is_exact else pages_for(self.options.context_tokens)

    @property
    def allocator_bytes(self) -> int:
        """Most that torch may reserve: the card without CUDA's context and the spare."""
        return self.options.vram_bytes - CONTEXT_BYTES - SPARE_BYTES


def kv_bytes(shape: ModelShape, num_tokens: int, kv_format: KVFormatName) -> int:
    """Return what keys and values of so many tokens take."""
    return num_tokens * KV_FORMATS[kv_format].stored_bytes(shape.kv_values)


def pinned_bytes(shape: ModelShape) -> int:
    """Return the memory of the host that is pinned at the start to read stored prompts back."""
    return RING_BYTES + SPARE_STATES * shape.state_bytes


def exact_pages(options: PlanOptions) -> int:
    """Return the pages in f16: all of them, or the newest of each sequence and document."""
    all_pages = pages_for(options.context_tokens)
    if options.kv_format == "f16":
        return all_pages
    return (options.slots + options.documents) * min(all_pages, NEWEST_PAGES)


def captured_chunks(shape: ModelShape) -> tuple[int, ...]:
    """Return the sizes of chunks that are captured: those that are bound by their launches."""
    if shape.state_bytes:
        return ()
    most = MOST_CAPTURED_WORK // shape.largest_group_values
    return tuple(rows for rows in CHUNK_ROWS if rows <= most)


def plan_memory(shape: ModelShape, options: PlanOptions) -> MemoryPlan:
    """Add up what the options take."""
    parts = [
        PlanPart("weights", shape.device_weight_bytes),
        *_kv_parts(shape, options),
        PlanPart("recurrent state", options.slots * shape.state_bytes),
        PlanPart("tapes of rows to verify", options.slots * FEW_ROWS * shape.tape_bytes),
        *_work_parts(shape),
        PlanPart("rows that drafters read", _stream_bytes(shape, options)),
        *_drafter_parts(shape, options),
        PlanPart("CUDA graphs", GRAPHS_BYTES, is_estimate=True),
        PlanPart("CUDA context", CONTEXT_BYTES, is_estimate=True),
        PlanPart("left free", SPARE_BYTES, is_estimate=True),
    ]
    return MemoryPlan(shape, options, tuple(part for part in parts if part.num_bytes))


def most_context_tokens(shape: ModelShape, options: PlanOptions) -> int:
    """Return the longest context that fits, whole pages, 0 if none; at most the model's own."""
    low, high = 0, pages_for(shape.context_tokens)
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
    others = [options.slots + 1] + ([options.slots - 1] if options.slots > 1 else [])
    changes += [(f"--slots {slots}", replace(options, slots=slots)) for slots in sorted(others)]
    if options.drafter is not None:
        changes.append(("no drafter", replace(options, drafter=None)))
    return [(name, most_context_tokens(shape, changed)) for name, changed in changes]


def plan_to_fit(
    shape: ModelShape, options: PlanOptions, *, shrinks: bool, min_tokens: int = PAGE_TOKENS
) -> MemoryPlan:
    """Plan, with less context than asked for if `shrinks`.

    Args:
        shape: Of the model.
        options: What is asked for; the context is cut to the model's own.
        shrinks: Whether less context will do, because nobody named one.
        min_tokens: Less than this is no context.

    Raises:
        DeviceMemoryShort: It does not fit; names the nearest settings that do.
    """
    wanted = min(options.context_tokens, shape.context_tokens)
    planned = plan_memory(shape, replace(options, context_tokens=wanted))
    if planned.fits:
        return planned
    most = most_context_tokens(shape, options)
    if shrinks and most >= min_tokens:
        return plan_memory(shape, replace(options, context_tokens=min(most, wanted)))
    raise DeviceMemoryShort(_refusal(planned, most))


def _refusal(planned: MemoryPlan, most: int) -> str:
    shape, options = planned.shape, planned.options
    have, needed = options.vram_bytes / _GIB, planned.total_bytes / _GIB
    text = (
        f"{shape.name} with {options.context_tokens:,} tokens of context, {options.kv_format} "
        f"keys and values{', a drafter' if options.drafter else ''} and --slots {options.slots} "
        f"takes {needed:.2f} GiB, and {have:.2f} GiB are there"
    )
    others = alternatives(shape, options)
    enough = [name for name, tokens in others if tokens >= options.context_tokens]
    fitting = [f"{name} with {tokens:,} tokens" for name, tokens in others if tokens > most]
    if most:
        enough.append(f"--ctx {most}")
    if enough:
        return f"{text}; what fits: {', or '.join(enough)}"
    if fitting:
        return f"{text}; what fits: {', or '.join(fitting)}"
    least = plan_memory(shape, replace(options, context_tokens=PAGE_TOKENS)).total_bytes / _GIB
    return (
        f"{text}; with hardly any context it takes {least:.2f} GiB: take a smaller model or "
        "quantisation, a card with more memory, or --device cpu"
    )


def _kv_values(layer: HeadShape) -> int:
    return 2 * layer.num_kv_heads * layer.head_dim


def _kv_parts(shape: ModelShape, options: PlanOptions) -> list[PlanPart]:
    kv_format = options.kv_format
    padding = -options.context_tokens % PAGE_TOKENS
    stored = kv_bytes(shape, options.context_tokens, kv_format)
    parts = [
        PlanPart(f"keys and values, {kv_format}", stored),
        PlanPart("rest of their last page", kv_bytes(shape, padding, kv_format)),
    ]
    if kv_format != "f16":
        newest = kv_bytes(shape, exact_pages(options) * PAGE_TOKENS, "f16")
        parts.append(PlanPart("newest keys and values, f16", newest))
    return parts


def _work_parts(shape: ModelShape) -> list[PlanPart]:
    """Work space of prefill and of steps with few rows; the two share nothing."""
    rows = PREFILL_ROWS + PAGE_TOKENS
    # Residual and normed rows; products in bfloat16 and what is made of them; queries and sums.
    row_bytes = 8 * shape.hidden_size + 3 * shape.widest_group + 8 * shape.query_values
    captured = sum(captured_chunks(shape))
    layer_values = max(map(_kv_values, shape.kv_layers), default=0)
    logits = 2 * FEW_ROWS * shape.vocab_size * 4
    return [
        PlanPart("a group of matrices, unpacked", 2 * shape.largest_group_values, is_estimate=True),
        PlanPart("rows of a prompt", rows * row_bytes, is_estimate=True),
        PlanPart("rows of captured chunks", captured * row_bytes, is_estimate=True),
        PlanPart("keys and values, unpacked", 2 * HISTORY_TOKENS * layer_values, is_estimate=True),
        PlanPart("logits", logits, is_estimate=True),
    ]


def _stream_bytes(shape: ModelShape, options: PlanOptions) -> int:
    """Return what rows behind the last layer take, and their copies in a forward of several."""
    is_read = options.drafter is not None or (options.mtp and shape.has_mtp)
    return 2 * 2 * shape.hidden_size * (PREFILL_ROWS + FEW_ROWS) if is_read else 0


def _drafter_parts(shape: ModelShape, options: PlanOptions) -> list[PlanPart]:
    drafter = options.drafter
    if drafter is None:
        return []
    # Logits in parts, added up, put together, and as powers that are added up.
    logits = 5 * drafter.block_rows * shape.vocab_size * 4
    # Once where they are written, once as a forward of several sequences collects them.
    features = 2 * 2 * len(drafter.tap_layers) * shape.hidden_size * (PREFILL_ROWS + FEW_ROWS)
    moved = 2 * drafter.ring_bytes  # keys and values on their way to or from a stored prompt
    more_values = max(0, drafter.largest_values - shape.largest_group_values)
    return [
        PlanPart("drafter", drafter.weight_bytes),
        PlanPart("drafter: keys and values", options.slots * drafter.ring_bytes),
        PlanPart("drafter: rows that it reads", features),
        PlanPart("drafter: work", logits + moved + 2 * more_values, is_estimate=True),
    ]
