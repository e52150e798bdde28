"""Chooses between card and CPU, and says in words what keeps a card from being used."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from ragflash.errors import DeviceError, DeviceMemoryShort, DeviceMissing, DeviceUnsupported
from ragflash.kvcache.planner import CONTEXT_BYTES, MemoryPlan

DeviceChoice = Literal["auto", "cpu", "cuda"]

LEAST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies: an A100, an RTX 3060 and later

_GIB = 1 << 30
_SMALL_BYTES, _SMALL_PIECES = 1 << 20, 16
_LOGITS_BYTES = 32 << 20
_INSTEAD = "or run on the processor with --device cpu"
_log = logging.getLogger(__name__)


def choose_device(wanted: DeviceChoice) -> torch.device:
    """Return where to run; `auto` is the first card if it can be used, else the CPU.

    Raises:
        DeviceError: `cuda` was asked for and cannot be used; the subclass and the text say why.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    try:
        require_card()
    except DeviceError as error:
        if wanted == "cuda":
            raise
        _log.info("the model runs on the processor", extra={"reason": error.detail})
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def require_card() -> None:
    """Raise the `DeviceError` that says why no card can be used, if none can."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter from a build without CUDA
        reason = str(error).partition("\n")[0]
        if "driver" in reason and "too old" in reason:
            raise DeviceUnsupported(
                f"the card's driver is too old ({reason}): install a newer one, {_INSTEAD}"
            ) from error
        raise DeviceMissing(
            f"no card can be used ({reason}): see what `nvidia-smi` says, {_INSTEAD}"
        ) from error
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        raise DeviceUnsupported(
            f"{torch.cuda.get_device_name()} has compute capability {found}, and {least} is needed "
            f"(RTX 30 and later): take another card, {_INSTEAD}"
        )


def usable_bytes(vram_bytes: int | None) -> int:
    """Return what this process may take of the current card, its CUDA context included.

    Args:
        vram_bytes: At most that much, as if the card had no more; `None` is all that is free.

    Raises:
        DeviceMemoryShort: The card is smaller than `vram_bytes`.
    """
    free, total = torch.cuda.mem_get_info()
    if vram_bytes is not None and vram_bytes > total:
        raise DeviceMemoryShort(
            f"--vram {vram_bytes / _GIB:.4g} is more than the {total / _GIB:.4g} GiB that "
            f"{torch.cuda.get_device_name()} has"
        )
    usable = min(total, free + CONTEXT_BYTES)  # the context is there by now, and in the plan
    if usable < (vram_bytes or total):
        fields = {"free_bytes": free, "total_bytes": total}
        _log.info("others hold a part of the card", extra=fields)
    return usable if vram_bytes is None else min(usable, vram_bytes)


def limit_allocator(planned: MemoryPlan) -> None:
    """Keep torch's allocator inside the plan's card, whatever the card at hand has."""
    total = torch.cuda.mem_get_info()[1]
    fraction = min(1.0, max(0, planned.allocator_bytes) / total)
    torch.cuda.set_per_process_memory_fraction(fraction)


def reserve_passing_memory() -> None:
    """Have torch's allocator hold what steps take in passing, so that none asks the driver.

    Tensors of up to 1 MiB come from blocks of 2 MiB, of which more get broken up the more varied
    requests are; logits of several sequences are put together in one larger piece.
    """
    pieces = [_SMALL_BYTES] * _SMALL_PIECES + [_LOGITS_BYTES]
    held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in pieces]
    held.clear()


@contextmanager
def explained_memory(planned: MemoryPlan) -> Iterator[None]:
    """Turn running out of memory while a plan is carried out into an error that says what to do.

    Raises:
        DeviceMemoryShort: The card had less than the plan was told.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise DeviceMemoryShort(
            f"the card ran out of memory while {planned.shape.name} was loaded: "
            f"{planned.total_bytes / _GIB:.2f} GiB were planned and {free / _GIB:.2f} of "
            f"{total / _GIB:.2f} GiB are free; if another process has taken memory (see "
            "`nvidia-smi`), end it, or take less with --ctx, --slots or --kv tq3_0"
        ) from error
