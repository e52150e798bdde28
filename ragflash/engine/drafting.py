"""Which drafter a request gets. Torch-free: clients prepare indexes on threads of their own."""

from collections import OrderedDict
from collections.abc import Mapping

from ragflash.engine.job import Job
from ragflash.engine.prompt import CompiledPrompt
from ragflash.engine.request import DraftMode, GenerateRequest, Request, SegmentKind
from ragflash.errors import InputError
from ragflash.speculative.costs import StepCosts
from ragflash.speculative.drafter import Drafter
from ragflash.speculative.lookup import IndexCache, LookupDrafter, Match, SourceIndex
from ragflash.speculative.policy import AdaptiveDrafter, Source
from ragflash.speculative.survival import DraftKind, Survival

INDEX_BYTES = 128 << 20
"""Of the documents' indexes that are kept: 18 bytes a token."""

LEAST_TOKENS = 16
"""Of a text that gets an index."""

_COPIED = frozenset({SegmentKind.DOCUMENT, SegmentKind.PASSAGES})
_LONG_MATCHES = (8, 13)  # tokens that match, where another bucket begins
_PRIORS: Mapping[str, tuple[float, ...]] = {
    "lookup": (0.6, 0.8, 0.9),
    "lookup_output": (0.5, 0.7, 0.85),
}
_MOST_DOCUMENTS = 256


class Drafting:
    """Makes the drafters of an engine's requests.

    Args:
        has_trees: Whether the model verifies trees.
        index_bytes: Of the documents' indexes that are kept.

    Attributes:
        costs: Of steps; the worker's thread measures them before it serves.
    """

    def __init__(self, *, has_trees: bool, index_bytes: int = INDEX_BYTES) -> None:
        self.costs: StepCosts | None = None
        self._has_trees = has_trees
        self._indexes = IndexCache(index_bytes)
        self._survival: OrderedDict[tuple[str, ...], Survival] = OrderedDict()

    def prepare(self, prompt: CompiledPrompt, request: Request) -> tuple[SourceIndex, ...]:
        """Index the documents of a prompt, those that are not yet; for any thread.

        Raises:
            InputError: The request wants drafts that this engine cannot make.
        """
        if not isinstance(request, GenerateRequest) or request.draft is DraftMode.OFF:
            return ()
        if request.draft is DraftMode.TREE and not self._has_trees:
            raise InputError("this model verifies chains alone: ask for draft lookup, not tree")
        return tuple(
            self._indexes.get(segment.token_ids)
            for segment in prompt.segments
            if segment.kind in _COPIED and len(segment.token_ids) >= LEAST_TOKENS
        )

    def __call__(self, job: Job) -> Drafter | None:
        """Make a job's drafter; for the worker's thread."""
        request = job.request
        if not isinstance(request, GenerateRequest) or request.draft is DraftMode.OFF:
            return None
        is_forced = request.draft is not DraftMode.AUTO
        lookup = LookupDrafter(
            job.sources,
            job.prompt.token_ids,
            written_from=_written_from(job.prompt),
            num_tokens=request.draft_tokens,
            has_branches=self._has_trees and request.draft is not DraftMode.LOOKUP,
        )
        if is_forced or self.costs is None:
            return lookup
        source = Source(lookup, lambda: kind_of(lookup.match))
        return AdaptiveDrafter([source], self.costs, self._survival_of(job))

    def _survival_of(self, job: Job) -> Survival:
        key = (job.request.namespace, *job.prompt.source_ids)
        survival = self._survival.setdefault(key, Survival(_PRIORS))
        self._survival.move_to_end(key)
        if len(self._survival) > _MOST_DOCUMENTS:
            self._survival.popitem(last=False)
        return survival


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
