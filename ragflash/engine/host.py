"""Pages for a model that plain torch runs."""

from dataclasses import dataclass
from typing import Literal

from ragflash.engine.placed import Placed
from ragflash.errors import SettingInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, PageForm, pages_for
from ragflash.kvcache.formats import KVFormatName
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.pages import KVLayout, KVPages, PackedPool, PagePool, packed_page_bytes
from ragflash.models.contract import Model
from ragflash.models.registry import ComputeDtype, load_model
from ragflash.models.weights import WeightForm

KVFormatChoice = KVFormatName | Literal["auto"]

_DOCUMENTS = 2  # stored segments that keep their newest pages exact beside those of all slots


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How pages are stored, and how many there are.

    Attributes:
        dtype: What the model computes in.
        weights: Whether 4-bit matrices are unpacked.
        kv_format: Of keys and values beyond the newest; `auto` keeps all as they are computed.
        grid_tokens: Decides which are the newest, see `kvcache.grid`.
        context_tokens: That sequences and stored segments share; `None` takes what fits.
        kv_bytes: Memory, where no context is named.
        max_slots: Sequences that run together.
    """

    dtype: ComputeDtype
    weights: WeightForm
    kv_format: KVFormatChoice
    grid_tokens: int
    context_tokens: int | None
    kv_bytes: int
    max_slots: int


def place_on_host(file: GGUFFile, options: HostOptions) -> Placed:
    """Load a model and make its pages.

    Raises:
        ModelError: The file cannot be used.
        SettingInvalid: As `host_pages` raises it, or nothing can stay packed.
    """
    model = load_model(file, dtype=options.dtype, weights=options.weights)
    pages, allocators = host_pages(model, options)
    arithmetic = str(model.compute_dtype).removeprefix("torch.")
    if options.weights == "packed":
        arithmetic += "+int4"
    return Placed(model, pages, allocators, device="cpu", arithmetic=arithmetic)


def host_pages(model: Model, options: HostOptions) -> tuple[KVPages, PageAllocators]:
    """Make the pages of a model.

    Raises:
        SettingInvalid: The format fits no CPU or not the model, or there is no memory for a page.
    """
    layout, kv_format = model.kv_layout, options.kv_format
    if kv_format == "auto" or not layout.layers:
        num_pages = _num_exact_pages(model, options)
        return KVPages(PagePool(layout, num_pages)), PageAllocators(PageAllocator(num_pages))
    _check(layout, kv_format)
    grid = _grid(options.grid_tokens)
    num_exact, num_packed = _num_pages(layout, kv_format, grid, options)
    packed = PackedPool(layout, kv_format, num_packed)
    return KVPages(PagePool(layout, num_exact), packed), PageAllocators(
        PageAllocator(num_exact), PageAllocator(num_packed, PageForm.PACKED), grid
    )


def _check(layout: KVLayout, kv_format: KVFormatName) -> None:
    if kv_format == "f16":
        raise SettingInvalid(
            "on a CPU, keys and values are kept as they are computed or in fewer bits than f16: "
            "choose auto, q8_0, q4_0, tq4 or tq3_0 as the format"
        )
    for head_dim in {layer.head_dim for layer in layout.layers}:
        if head_dim not in (32, 64) and head_dim % 128:
            raise SettingInvalid(
                f"{kv_format} does not store heads of {head_dim} values: choose auto as the format"
            )


def _grid(tokens: int) -> Grid:
    try:
        return Grid(tokens)
    except ValueError as error:
        raise SettingInvalid(str(error)) from error


def _num_exact_pages(model: Model, options: HostOptions) -> int:
    page_bytes = model.kv_layout.page_bytes
    if options.context_tokens is not None:
        return pages_for(options.context_tokens)
    if page_bytes == 0:
        return pages_for(model.context_tokens) * options.max_slots
    _require(options.kv_bytes, page_bytes)
    return options.kv_bytes // page_bytes


def _num_pages(
    layout: KVLayout, kv_format: KVFormatName, grid: Grid, options: HostOptions
) -> tuple[int, int]:
    """Return how many exact and packed pages there are; exact ones take 3/4 of it at most."""
    newest = (options.max_slots + _DOCUMENTS) * grid.most_exact_pages
    if options.context_tokens is not None:
        num_packed = pages_for(options.context_tokens)
        return min(newest, (options.max_slots + _DOCUMENTS) * num_packed), num_packed
    exact_bytes, packed_bytes = layout.page_bytes, packed_page_bytes(layout, kv_format)
    _require(options.kv_bytes, exact_bytes + packed_bytes)
    num_exact = max(1, min(newest, options.kv_bytes * 3 // 4 // exact_bytes))
    return num_exact, (options.kv_bytes - num_exact * exact_bytes) // packed_bytes


def _require(kv_bytes: int, page_bytes: int) -> None:
    if kv_bytes < page_bytes:
        raise SettingInvalid(
            f"{kv_bytes} bytes for keys and values hold no page of {PAGE_TOKENS} tokens; "
            f"this model needs {page_bytes} bytes for one"
        )
