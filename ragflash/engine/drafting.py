"""Which drafter a request gets. Torch-free: clients prepare indexes on threads of their own."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ragflash.engine.learned import Learned
from ragflash.engine.prompt import CompiledPrompt
from ragflash.engine.request import DraftMode, GenerateRequest, Request, SegmentKind
from ragflash.engine.sequence import Sequence
from ragflash.errors import InputError
from ragflash.kvcache.identity import DRAFTER_PART, MTP_PART
from ragflash.speculative.costs import StepCosts
from ragflash.speculative.drafter import Drafter
from ragflash.speculative.grafted import TREE_TOKENS, BlockDrafter, TreeDrafter, trunk_tokens
from ragflash.speculative.lookup import IndexCache, LookupDrafter, Match
from ragflash.speculative.policy import AdaptiveDrafter, Source
from ragflash.speculative.survival import DraftKind

if TYPE_CHECKING:
    from ragflash.speculative.rows import RowDrafter  # imports torch

INDEX_BYTES = 128 << 20
"""Of the documents' indexes that are kept: 18 bytes a token."""

LEAST_TOKENS = 16
"""Of a text that gets an index."""

_COPIED = frozenset({SegmentKind.DOCUMENT, SegmentKind.PASSAGES})
_LONG_MATCHES = (8, 13)  # tokens that match, where another bucket begins
_PRIORS: Mapping[str, tuple[float, ...]] = {
    "lookup": (0.6, 0.8, 0.9),
    "lookup_output": (0.5, 0.7, 0.85),
    "mtp": (0.7,),
    "dflash": (0.7,),
    "dflash_tree": (0.8,),  # of a trunk with branches
}
_OWN_PARTS: Mapping[DraftMode, str] = {DraftMode.MTP: MTP_PART, DraftMode.DFLASH: DRAFTER_PART}
"""Modes whose drafters are told rows of the model, by the names of these."""

_LACKING: Mapping[DraftMode, str] = {
    DraftMode.MTP: "it has no block of multi-token prediction, or RAGFLASH_MTP=off turns it off",
    DraftMode.DFLASH: "it was given no drafter: name its file with RAGFLASH_DRAFTER",
}


class Drafting:
    """Makes the drafters of an engine's requests.

    Args:
        parts: Names of what drafters that are told rows of the model keep (`RowDrafting`).
        index_bytes: Of the documents' indexes that are kept.
        learned_path: See `Learned`.

    Attributes:
        costs: Of steps; the worker's thread measures them before it serves.
        learned: How drafts of documents have done.
    """

    def __init__(
        self,
        parts: Collection[str] = (),
        *,
        index_bytes: int = INDEX_BYTES,
        learned_path: Path | None = None,
    ) -> None:
        self.costs: StepCosts | None = None
        self._parts = parts
        self._indexes = IndexCache(index_bytes)
        self.learned = Learned(_PRIORS, learned_path)

    def prepare(self, prompt: CompiledPrompt, request: Request) -> LookupDrafter | None:
        """Make what looks a request's drafts up, indexes included; for any thread.

        Raises:
            InputError: The request wants drafts that this engine cannot make.
        """
        if not isinstance(request, GenerateRequest) or request.draft is DraftMode.OFF:
            return None
        if request.draft in _OWN_PARTS:
            if _OWN_PARTS[request.draft] not in self._parts:
                why = _LACKING[request.draft]
                raise InputError(f"this engine cannot draft by {request.draft}: {why}")
            return None
        given = dict(request.copied)
        indexes = (
            self._indexes.get(segment.token_ids)
            for segment in prompt.segments
            if segment.kind in _COPIED and len(segment.token_ids) >= LEAST_TOKENS
            if not segment.source_ids or segment.source_ids - given.keys()
        )
        return LookupDrafter(
            (*given.values(), *indexes),
            prompt.token_ids,
            written_from=_written_from(prompt),
            num_tokens=request.draft_tokens,
            has_branches=request.draft is DraftMode.TREE,
        )

    def forget_texts(self) -> None:
        """Keep no text of documents; their indexes are made again when they are wanted."""
        self._indexes.clear()

    def __call__(self, sequence: Sequence) -> Drafter | None:
        """Make a sequence's drafter; for the worker's thread."""
        job, told = sequence.job, sequence.row_drafters
        request, lookup = job.request, job.lookup
        if not isinstance(request, GenerateRequest) or request.draft is DraftMode.OFF:
            return None
        if request.draft in _OWN_PARTS:
            return told[_OWN_PARTS[request.draft]]
        block = told.get(DRAFTER_PART)
        if request.draft is DraftMode.TREE and lookup and isinstance(block, BlockDrafter):
            return TreeDrafter(block, lookup, request.draft_tokens or TREE_TOKENS)
        if lookup is None or request.draft is not DraftMode.AUTO or self.costs is None:
            return lookup
        sources = [Source(lookup, lambda: kind_of(lookup.match)), *map(_source, told.values())]
        if block is not None:
            sources.append(_tree_source(block, lookup))
        survival = self.learned.of(request.namespace, job.prompt.source_ids)
        # Logits come to the host first: only who needs none has steps that are begun early.
        return AdaptiveDrafter(sources, self.costs, survival, is_early=sequence.takes_largest)


def _source(drafter: "RowDrafter") -> Source:
    """Offer a drafter that costs time, where it has been told all that is before the newest token.

    What it proposes is one kind, named by its source.
    """
    return Source(
        drafter,
        lambda: DraftKind(drafter.source),
        is_free=False,
        most_tokens=drafter.most_tokens,
        is_ready=lambda num_tokens: drafter.position == num_tokens - 1,
    )


def _tree_source(block: "RowDrafter", lookup: LookupDrafter) -> Source:
    """Offer the tree of a block drafter, whose branches are what is looked up, too."""
    assert isinstance(block, BlockDrafter)
    return Source(
        TreeDrafter(block, lookup),
        lambda: DraftKind(f"{block.source}_tree"),
        is_free=False,
        most_tokens=TREE_TOKENS,
        depth=lambda num_tokens: min(trunk_tokens(num_tokens), block.most_tokens),
        is_ready=lambda num_tokens: block.position == num_tokens - 1,
    )


def refuse_drafts(request: Request) -> None:
    """Refuse, for an engine that does not draft, a request that wants drafts of some kind.

    Raises:
        InputError: It does.
    """
    if isinstance(request, GenerateRequest) and request.draft not in _WITHOUT:
        raise InputError(f"this engine does not draft: draft {request.draft} cannot be had")


_WITHOUT = frozenset({DraftMode.AUTO, DraftMode.OFF})


def kind_of(match: Match | None) -> DraftKind:
    """Put a looked-up draft beside those that rest on as much."""
    if match is None:
        return DraftKind("lookup")
    return DraftKind(match.source, sum(match.length >= least for least in _LONG_MATCHES))


def _written_from(prompt: CompiledPrompt) -> int:
    """Return where the last document of a prompt ends."""
    ends = zip(prompt.segments, prompt.ends, strict=True)
    return max((end for segment, end in ends if segment.kind in _COPIED), default=0)
