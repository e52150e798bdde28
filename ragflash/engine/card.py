"""A model on a card: planned before anything is loaded, then loaded, paged and captured."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from ragflash.engine.device import (
    explained_memory,
    limit_allocator,
    reserve_passing_memory,
    usable_bytes,
)
from ragflash.engine.host import KVFormatChoice
from ragflash.engine.placed import Placed
from ragflash.errors import SettingInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.allocator import PageAllocator, PageForm, pages_for
from ragflash.kvcache.formats import KVFormatName
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.pages import KVLayout, KVPages, PackedPool, PagePool
from ragflash.kvcache.planner import (
    GRID_TOKENS,
    PREFILL_ROWS,
    MemoryPlan,
    PlanOptions,
    captured_chunks,
    plan_to_fit,
)
from ragflash.models.decoder import Decoder
from ragflash.models.device.graphs import ROW_COUNTS
from ragflash.models.device.model import DeviceModel
from ragflash.models.device.tables import MAX_ROWS
from ragflash.models.dflash import Target, load_drafter
from ragflash.models.dflash.device import DeviceDFlash
from ragflash.models.dflash.shape import drafter_shape
from ragflash.models.known_formats import known_format
from ragflash.models.registry import load_records
from ragflash.models.shapes import model_shape

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CardOptions:
    """What is asked of a card.

    Attributes:
        vram_bytes: Most of its memory; `None` is all that is free.
        context_tokens: That sequences and stored segments share; `None` takes what fits.
        kv_format: Of keys and values beyond the newest.
        max_slots: Requests that run together.
        verify_rows: Most rows of a request in one step, drafted ones included.
        exact: Compute every row by the same instructions, whatever is computed beside it: slower,
            and equal bit for bit with and without drafts.
        mtp: Whether the file's block of multi-token prediction drafts, if it has one.
        drafter: GGUF file of a DFlash drafter; `None` for none.
    """

    vram_bytes: int | None
    context_tokens: int | None
    kv_format: KVFormatName
    max_slots: int
    verify_rows: int
    exact: bool = False
    mtp: bool = False
    drafter: Path | None = None


def card_format(wanted: KVFormatChoice, model_hash: str, folder: Path | None) -> KVFormatName:
    """Return the format of keys and values; `auto` is `q8_0` for a file that was never measured.

    Args:
        wanted: What is asked for.
        model_hash: SHA-256 of the file.
        folder: Where formats are remembered that were measured on this machine.
    """
    if wanted != "auto":
        return wanted
    return known_format(model_hash, folder) or "q8_0"


def place_on_card(file: GGUFFile, device: torch.device, options: CardOptions) -> Placed:
    """Plan, load and capture; takes as long as the file takes to read, and some seconds.

    Raises:
        DeviceMemoryShort: It does not fit; says with which settings it would.
        ModelError: The file, or its drafter, cannot be run on a card.
        SettingInvalid: More rows are to be verified than a tape has room for.
    """
    if options.verify_rows > MAX_ROWS:
        raise SettingInvalid(
            f"verify_rows = {options.verify_rows}: a card verifies {MAX_ROWS} rows at most"
        )
    torch.cuda.empty_cache()  # what a model before this one took
    plan = _plan(file, options)
    limit_allocator(plan)
    with explained_memory(plan):
        decoder = load_records(file, device)
        torch.cuda.empty_cache()  # what repacking took
        pages, allocators = _pages(plan, decoder.kv_layout, device)
        context_pages = pages_for(plan.options.context_tokens)
        grid, has_mtp = allocators.grid, options.mtp and decoder.mtp is not None
        model = DeviceModel(
            decoder,
            device,
            pages,
            num_tokens=len(file.require_array("tokenizer.ggml.tokens", str)),
            max_slots=options.max_slots,
            exact_pages=context_pages if grid is None else grid.most_exact_pages,
            packed_pages=0 if grid is None else context_pages,
            chunk_tokens=PREFILL_ROWS,
            chunk_counts=captured_chunks(plan.shape),
            row_counts=ROW_COUNTS[-1:] if options.exact else ROW_COUNTS,
            tap_layers=_tap_layers(plan, has_mtp=has_mtp),
            has_mtp=has_mtp,
        )
        drafter = _place_drafter(decoder, model, options)
        torch.cuda.empty_cache()  # what compiling took
        model.warm_up()
        reserve_passing_memory()
        torch.cuda.synchronize(device)
    _log.info("the model is on the card", extra=_measured(plan, device))
    name = torch.cuda.get_device_name(device)
    return Placed(model, pages, allocators, name, "int8+bfloat16", model.warm_up, drafter)


def _plan(file: GGUFFile, options: CardOptions) -> MemoryPlan:
    shape = model_shape(file)
    context_tokens = options.context_tokens
    asked = PlanOptions(
        vram_bytes=usable_bytes(options.vram_bytes),
        context_tokens=shape.context_tokens if context_tokens is None else context_tokens,
        kv_format=options.kv_format,
        slots=options.max_slots,
        mtp=options.mtp,
        drafter=None if options.drafter is None else drafter_shape(options.drafter),
    )
    return plan_to_fit(shape, asked, shrinks=context_tokens is None)


def _tap_layers(plan: MemoryPlan, *, has_mtp: bool) -> tuple[int, ...] | None:
    """Return whose rows drafters read beside those of the last layer; `None` without drafters."""
    drafter = plan.options.drafter
    if drafter is not None:
        return drafter.tap_layers
    return () if has_mtp else None


def _place_drafter(
    decoder: Decoder, model: DeviceModel, options: CardOptions
) -> DeviceDFlash | None:
    if options.drafter is None:
        return None
    device, target = model.workspace.device, Target.of(decoder)
    loaded = load_drafter(
        options.drafter, target, dtype=torch.bfloat16, device=device, form="records"
    )
    torch.cuda.empty_cache()  # what repacking took
    return DeviceDFlash(
        loaded,
        device,
        max_slots=options.max_slots,
        chunk_tokens=PREFILL_ROWS,
        workspace=model.workspace,
    )


def _pages(
    plan: MemoryPlan, layout: KVLayout, device: torch.device
) -> tuple[KVPages, PageAllocators]:
    exact = PagePool(layout, plan.exact_pages, device)
    if not plan.packed_pages:
        return KVPages(exact), PageAllocators(PageAllocator(plan.exact_pages))
    packed = PackedPool(layout, plan.options.kv_format, plan.packed_pages, device)
    allocators = PageAllocators(
        PageAllocator(plan.exact_pages),
        PageAllocator(plan.packed_pages, PageForm.PACKED),
        Grid(GRID_TOKENS),
    )
    return KVPages(exact, packed), allocators


def _measured(plan: MemoryPlan, device: torch.device) -> dict[str, int]:
    return {
        "planned_bytes": plan.total_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
    }
