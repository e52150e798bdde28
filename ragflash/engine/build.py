"""Puts an engine together from a model file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ragflash.engine.card import CardOptions, card_format, place_on_card
from ragflash.engine.client import EngineClient
from ragflash.engine.core import EngineCore, Vocabulary
from ragflash.engine.device import DeviceChoice, choose_device
from ragflash.engine.drafting import Drafting
from ragflash.engine.file_tier import FileTier
from ragflash.engine.host import HostOptions, KVFormatChoice, place_on_host
from ragflash.engine.identity import ModelText, identify
from ragflash.engine.learned import learned_path
from ragflash.engine.placed import Placed
from ragflash.engine.request import EngineInfo
from ragflash.engine.row_drafters import NO_FILE, DrafterOptions, RowDrafting, load_row_drafting
from ragflash.engine.runner import Runner
from ragflash.engine.scheduler import Scheduler
from ragflash.engine.sequence import DrafterFactory
from ragflash.engine.step_costs import measure_step_costs
from ragflash.engine.worker import Worker
from ragflash.errors import SettingInvalid
from ragflash.gguf.chat_template import ChatTemplate
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.kvcache.archive import SegmentArchive
from ragflash.kvcache.identity import DRAFTER_PART, MTP_PART
from ragflash.kvcache.mover import mover_of
from ragflash.kvcache.planner import GRID_TOKENS, PREFILL_ROWS
from ragflash.kvcache.tree import SegmentTree
from ragflash.models.registry import ComputeDtype
from ragflash.models.weights import WeightForm, weight_format


def start_engine(
    model_path: Path,
    *,
    device: DeviceChoice = "auto",
    vram_bytes: int | None = None,
    context_tokens: int | None = None,
    verify_rows: int = 21,
    dtype: ComputeDtype = "auto",
    weights: WeightForm = "dense",
    pre_tokenizer: str | None = None,
    kv_format: KVFormatChoice = "auto",
    kv_bytes: int = 2 << 30,
    grid_tokens: int = GRID_TOKENS,
    max_slots: int = 4,
    queue_size: int = 64,
    prefill_chunk_tokens: int = 512,
    threads: int | None = None,
    cache_dir: Path | None = None,
    drafts: bool = False,
    row_drafters: DrafterOptions = NO_FILE,
    drafter_factory: DrafterFactory | None = None,
    exact: bool = False,
    archive: SegmentArchive | None = None,
) -> EngineClient:
    """Load a model and start its worker; blocks until the model is loaded.

    `GGUFFile.open` says what `model_path` may be; `device` `auto` is the first card that can be
    used, else the CPU: see `CardOptions`, `card_format` and `HostOptions`. On a CPU
    `prefill_chunk_tokens` are the most of a prompt in a step. Beyond `max_slots` `queue_size` may
    wait. `cache_dir` keeps hashes, formats, how drafts did. With `drafts` answers are drafted where
    it pays, also by `row_drafters`, or as `drafter_factory` says. Close `archive` after the engine.

    Raises:
        ModelError: A file cannot be used.
        DeviceError: The card cannot be used as it was asked to be.
        SettingInvalid: A size or a name cannot be used, or a drafter would never be asked.
    """
    _check(threads=threads, max_slots=max_slots, prefill_chunk_tokens=prefill_chunk_tokens)
    _check(context_tokens=context_tokens, verify_rows=verify_rows)
    threads = threads or torch.get_num_threads()
    where, model_hash = choose_device(device), content_hash(model_path, cache_dir)
    drafts = row_drafters.checked(is_asked=drafts)
    host = HostOptions(dtype, weights, kv_format, grid_tokens, context_tokens, kv_bytes, max_slots)
    place = partial(place_on_host, options=host)
    if is_card := where.type == "cuda":
        kv = card_format(kv_format, model_hash, cache_dir)
        asked = vram_bytes, context_tokens, kv, max_slots, verify_rows, exact
        card = CardOptions(*asked, drafts and row_drafters.mtp, row_drafters.file)
        place = partial(place_on_card, device=where, options=card)
    loaded = _load(model_path, pre_tokenizer, place)
    told = load_row_drafting(loaded.placed, row_drafters, model_hash, cache_dir) if drafts else None
    info = _info(loaded, model_hash)
    chunk_tokens = PREFILL_ROWS if is_card else prefill_chunk_tokens
    drafting = _drafting(told, model_hash, cache_dir) if drafts else None
    turns = _Turns(max_slots, chunk_tokens, drafter_factory or drafting, verify_rows - 1)
    arithmetic = (f"exact {exact}",) if is_card else (_cpu(), f"{threads} threads")
    core = _core(loaded, info, turns, arithmetic, archive, told)
    prepare = partial(_prepare, loaded.placed, drafting, verify_rows, threads)
    worker = Worker(core, max_in_flight=max_slots + queue_size, prepare=prepare).awaited()
    return EngineClient(worker, loaded.tokenizer, loaded.template, info, drafting)


def _drafting(told: RowDrafting | None, model_hash: str, cache_dir: Path | None) -> Drafting:
    drafters = told.depends_on if told else {}
    learned = learned_path(cache_dir, model_hash, drafters)
    return Drafting(drafters, learned_path=learned)


def _prepare(placed: Placed, drafting: Drafting | None, most_rows: int, threads: int) -> None:
    """Do what the worker's own thread does before it serves."""
    # OpenMP keeps the number of threads per calling thread, so the worker must set its own.
    torch.set_num_threads(threads)
    placed.warm_up()
    if drafting is not None:
        drafting.costs = measure_step_costs(placed, most_rows=most_rows)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a model file gives."""

    placed: Placed
    tokenizer: Tokenizer
    template: ChatTemplate
    file_name: str
    architecture: str
    stored_as: str
    rope: Mapping[str, object]


def _load(path: Path, pre_tokenizer: str | None, place: Callable[[GGUFFile], Placed]) -> _Loaded:
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file, pre_tokenizer=pre_tokenizer)
        return _Loaded(
            placed=place(file),
            tokenizer=tokenizer,
            template=ChatTemplate.from_gguf(file, tokenizer),
            file_name=file.path.name,
            architecture=file.require("general.architecture", str),
            stored_as=weight_format(file),
            rope={key: value for key, value in file.metadata.items() if ".rope." in key},
        )


@dataclass(frozen=True, slots=True)
class _Turns:
    """What a step may hold; see `start_engine`."""

    max_slots: int
    chunk_tokens: int
    drafter_factory: DrafterFactory | None
    draft_tokens: int


def _core(
    loaded: _Loaded,
    info: EngineInfo,
    turns: _Turns,
    arithmetic: tuple[str, ...],
    archive: SegmentArchive | None,
    told: RowDrafting | None,
) -> EngineCore:
    placed = loaded.placed
    vocab_size, depends_on = loaded.tokenizer.vocab_size, told.depends_on if told else {}
    runner = Runner(placed.model, placed.pages, vocab_size=vocab_size, row_drafting=told)
    state_shapes = runner.state_shapes()
    identity = identify(
        placed,
        ModelText(
            weights=info.model_hash,
            architecture=loaded.architecture,
            rope=loaded.rope,
            tokenizer=loaded.tokenizer.fingerprint,
            template=loaded.template.source,
            drafter=depends_on.get(DRAFTER_PART, ""),
            mtp=depends_on.get(MTP_PART, ""),
        ),
        state_shapes=state_shapes,
        chunk_tokens=turns.chunk_tokens,
        arithmetic=arithmetic,
    )
    store, files = SegmentTree(placed.allocators), None
    if archive is not None:
        files = FileTier(archive, mover_of(placed.pages, state_shapes), store, identity)
    scheduler = Scheduler(
        allocators=placed.allocators,
        store=store,
        identity=identity.digest,
        max_slots=turns.max_slots,
        chunk_tokens=turns.chunk_tokens,
        score_tokens=1 + turns.draft_tokens,
        files=files,
    )
    return EngineCore(
        runner=runner,
        scheduler=scheduler,
        store=store,
        identity=identity.digest,
        vocabulary=Vocabulary.of(loaded.tokenizer),
        drafter_factory=turns.drafter_factory,
        draft_tokens=turns.draft_tokens,
        files=files,
    )


def _check(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise SettingInvalid(f"{name} = {value} must be at least 1")


def _info(loaded: _Loaded, model_hash: str) -> EngineInfo:
    placed = loaded.placed
    packed = placed.pages.packed
    exact_format = _name(placed.pages.exact.layout.dtype)
    return EngineInfo(
        model=loaded.file_name,
        model_hash=model_hash,
        architecture=loaded.architecture,
        weights=loaded.stored_as,
        compute_dtype=placed.arithmetic,
        kv_format=exact_format if packed is None else packed.kv_format,
        context_tokens=min(placed.model.context_tokens, placed.allocators.most_tokens),
        device=placed.device,
        template=loaded.template.origin,
    )


def _cpu() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
