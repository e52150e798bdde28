"""Drafters that read rows of the model: each sequence has its own, told all that is committed.

They are told whatever a request says of drafts, so that what is stored of a prompt is of use to
every request after it.
"""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from ragflash.engine.batch import Rows
from ragflash.engine.placed import Placed
from ragflash.engine.request import GenerateRequest
from ragflash.engine.sequence import Sequence
from ragflash.errors import SettingInvalid
from ragflash.kvcache.allocator import pages_for
from ragflash.kvcache.identity import DRAFTER_PART, MTP_PART
from ragflash.kvcache.pages import KVPages
from ragflash.kvcache.segments import Parts
from ragflash.models.contract import (
    ForwardBatch,
    GreedyTappedModel,
    SequenceRows,
    Tapped,
    TappedModel,
    TappedTokens,
)
from ragflash.models.decoder import Decoder
from ragflash.models.device.model import DeviceModel
from ragflash.models.dflash import (
    DFlashModel,
    DraftContext,
    DraftSequence,
    Target,
    drafter_hash,
    load_drafter,
)
from ragflash.models.dflash.device import DeviceDFlash, DeviceSequence
from ragflash.models.mtp import MAX_DEPTH
from ragflash.models.mtp_runner import HostMtp, MtpRunner
from ragflash.speculative.dflash import DFlashDrafter
from ragflash.speculative.mtp import MtpDrafter
from ragflash.speculative.rows import RowDrafter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What an engine is to draft with beside looking up.

    Attributes:
        mtp: Whether the model's block of multi-token prediction is used, if it has one.
        file: Of a DFlash drafter, as `load_drafter` takes it; `None` for none.
    """

    mtp: bool = True
    file: Path | None = None

    def checked(self, *, is_asked: bool) -> bool:
        """Refuse a drafter that nobody would ask, before a model is loaded; return `is_asked`.

        Args:
            is_asked: Whether the engine drafts.

        Raises:
            SettingInvalid: It does not.
        """
        if self.file is not None and not is_asked:
            raise SettingInvalid(
                f"the drafter {self.file} would never be asked: unset RAGFLASH_DRAFTER, or set "
                "RAGFLASH_DRAFT=auto"
            )
        return is_asked


NO_FILE = DrafterOptions()


class RowDrafting:
    """What an engine drafts with beside looking up; for the worker thread only.

    Args:
        model: That is drafted for.
        pages: Its keys and values, those of `mtp` among them.
        mtp: Runs its own block of multi-token prediction; `None` does without.
        dflash: A drafter of its own; `None` does without.
        depends_on: Names of what their drafters keep of a stored segment, and what each depends on
            beside the segment's identity.
    """

    def __init__(
        self,
        model: TappedModel,
        pages: KVPages,
        *,
        mtp: MtpRunner | None = None,
        dflash: DFlashModel | DeviceDFlash | None = None,
        depends_on: Mapping[str, str],
    ) -> None:
        self.depends_on = depends_on
        self._model = model
        self._greedy = model if isinstance(model, GreedyTappedModel) else None
        self._pages = pages
        self._mtp = mtp
        self._dflash = dflash
        self._tap_layers = () if dflash is None else dflash.config.tap_layers
        self._computed: Tapped | TappedTokens | None = None
        self._starts: dict[int, int] = {}

    def drafters(self, sequence: Sequence) -> dict[str, RowDrafter]:
        """Make a sequence's drafters, by the names of their parts of a stored segment."""
        request = sequence.job.request
        width = request.draft_tokens if isinstance(request, GenerateRequest) else None
        made: dict[str, RowDrafter] = {}
        if self._mtp is not None:
            rows_of = partial(_rows_of, sequence)
            made[MTP_PART] = MtpDrafter(self._mtp, rows_of, width or MAX_DEPTH)
        if self._dflash is not None:
            made[DRAFTER_PART] = DFlashDrafter(_context_of(self._dflash, sequence), width)
        return made

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Model.forward`; the rows are kept until they are committed, or the next ones."""
        computed = self._model.forward_tapped(batch, self._pages, self._tap_layers)
        self._keep(computed, batch)
        return computed.logits

    def forward_greedy(
        self, batch: ForwardBatch, *, goes_on: bool, meanwhile: Callable[[], None]
    ) -> list[int]:
        """See `GreedyModel.forward_greedy`; the model is one, and rows are kept as by `forward`."""
        assert self._greedy is not None
        computed = self._greedy.forward_greedy_tapped(
            batch, self._pages, self._tap_layers, goes_on=goes_on, meanwhile=meanwhile
        )
        self._keep(computed, batch)
        return computed.tokens

    def _keep(self, computed: Tapped | TappedTokens, batch: ForwardBatch) -> None:
        self._computed = computed
        counts = (rows.num_rows for rows in batch.sequences)
        starts = accumulate(counts, initial=0)
        slots = (rows.slot for rows in batch.sequences)
        self._starts = dict(zip(slots, starts, strict=False))

    @torch.inference_mode()
    def tell(self, rows: Rows, path: Run[int]) -> None:
        """Give a sequence's drafters rows of the last forward that become part of it.

        Args:
            rows: Of the sequence; its table does not have them yet.
            path: Numbers of those that are committed, at least one.
        """
        sequence, computed = rows.sequence, self._computed
        assert sequence.cache is not None
        assert computed is not None
        first = self._starts[sequence.cache.slot]
        token_ids = [rows.token_ids[row] for row in path]
        for name, drafter in sequence.row_drafters.items():
            read = computed.taps if name == DRAFTER_PART else computed.stream
            drafter.absorb(sequence.committed, token_ids, _pick(read, first, path))


def _context_of(drafter: DFlashModel | DeviceDFlash, sequence: Sequence) -> DraftContext:
    if isinstance(drafter, DFlashModel):
        return DraftSequence(drafter)
    return DeviceSequence(drafter, partial(_slot_of, sequence))


def _slot_of(sequence: Sequence) -> int:
    assert sequence.cache is not None
    return sequence.cache.slot


def _rows_of(sequence: Sequence, position: int, num_rows: int) -> SequenceRows:
    """Return rows of a sequence's tokens, with the pages that it has."""
    cache = sequence.cache
    assert cache is not None
    packed_pages = cache.table.packed_pages
    num_pages = pages_for(position + num_rows) - len(packed_pages)
    return SequenceRows(
        slot=cache.slot,
        num_rows=num_rows,
        committed=position,
        pages=cache.table.pages[:num_pages],
        logit_rows=(),
        packed_pages=packed_pages,
    )


def _pick(rows: torch.Tensor, first: int, path: Run[int]) -> torch.Tensor:
    """Return the rows of a path, which begins behind row `first`; copies those of a tree alone."""
    if path[-1] - path[0] == len(path) - 1:
        return rows[first + path[0] : first + path[-1] + 1]
    at = torch.tensor(path) + first
    # A copy from memory that is not pinned would wait for all that the card has to do.
    return rows[
        at if rows.device.type == "cpu" else at.pin_memory().to(rows.device, non_blocking=True)
    ]


def load_row_drafting(
    placed: Placed, options: DrafterOptions, model_hash: str, cache_dir: Path | None
) -> RowDrafting | None:
    """Load what reads rows of a placed model; `None` where nothing does.

    Args:
        placed: The model.
        options: What is wanted.
        model_hash: Of its file.
        cache_dir: See `content_hash`.

    Raises:
        ModelError: The drafter's file cannot be used, or not with this model.
    """
    model, depends_on = placed.model, dict[str, str]()
    assert isinstance(model, TappedModel)
    mtp = _mtp_of(placed) if options.mtp else None
    dflash: DFlashModel | DeviceDFlash | None = placed.drafter
    if mtp is not None:
        depends_on[MTP_PART] = model_hash
    if options.file is not None:
        if isinstance(model, Decoder):
            dflash = load_drafter(options.file, Target.of(model), dtype=model.compute_dtype)
        depends_on[DRAFTER_PART] = drafter_hash(options.file, cache_dir)
    if not depends_on:
        return None
    return RowDrafting(model, placed.pages, mtp=mtp, dflash=dflash, depends_on=depends_on)


def _mtp_of(placed: Placed) -> MtpRunner | None:
    """Return what runs the model's block of multi-token prediction, if it has one."""
    model = placed.model
    if isinstance(model, DeviceModel):
        return model.mtp
    if isinstance(model, Decoder) and model.mtp is not None:
        return HostMtp(model, model.mtp, placed.pages)
    return None


def export_parts(sequence: Sequence) -> Mapping[str, bytes]:
    """Return what a segment that ends here keeps of its sequence's drafters."""
    return {
        name: drafter.export_state()
        for name, drafter in sequence.row_drafters.items()
        if drafter.position == sequence.committed
    }


def load_parts(sequence: Sequence, parts: Parts) -> None:
    """Have a sequence's drafters go on from a stored segment, those that it keeps something of."""
    for name, drafter in sequence.row_drafters.items():
        if name in parts:
            try:
                drafter.load_state(bytes(parts[name]))
            except ValueError as error:  # it may come from a file; lacking it costs drafts alone
                _log.warning("a drafter begins anew", extra={"part": name, "reason": str(error)})
