"""An engine with things timed on it: requests behind documents that are really read."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragflash.bench.filler import Filler
from ragflash.bench.record import Series
from ragflash.bench.stub_drafter import DrafterSlot, StubDrafter
from ragflash.engine.client import EngineClient
from ragflash.engine.request import DraftMode, Finished, GenerateRequest
from ragflash.errors import EngineError
from ragflash.kvcache.allocator import PAGE_TOKENS, pages_for

ROOM_TOKENS = 512  # for the answers
VERIFIED_ROWS = (16, 21)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a measurement.

    Attributes:
        prefill: Of a prompt, or of a question behind a document, whose reading is timed.
        depth: Of the document behind which things are timed.
        whole: Of the prompt whose first token is waited for.
        decode: That are decoded in a run.
        steps: Verifications in a run.
        runs: Readings of decoding and of prefill.
        small_prefill: Of the prompt of the small model.
    """

    prefill: int = 8192
    depth: int = 131_072
    whole: int = 138_696
    decode: int = 128
    steps: int = 16
    runs: int = 3
    small_prefill: int = 512

    @property
    def context(self) -> int:
        """Tokens that there must be room for."""
        tokens = max(self.depth + self.prefill, self.whole) + ROOM_TOKENS
        return pages_for(tokens) * PAGE_TOKENS


class Figures:
    """Readings by name; those that llama.cpp's stand beside get a ratio, above 1 where faster."""

    def __init__(self, peers: Mapping[str, Sequence[float]]) -> None:
        self._peers = peers
        self.series: dict[str, Series] = {}

    def add(self, name: str, unit: str, values: Sequence[float]) -> None:
        """Take readings down."""
        self.series[name] = Series(unit, list(values))
        if name not in self._peers:
            return
        peer = statistics.median(self._peers[name])
        rates = unit == "tokens/s"
        quantity, _, at = name.partition("_depth")
        ratio = f"{quantity}_ratio_vs_llamacpp" + (f"_depth{at}" if at else "")
        self.series[f"llamacpp_{name}"] = Series(unit, list(self._peers[name]))
        self.series[ratio] = Series(
            "times", [value / peer if rates else peer / value for value in values]
        )


class Session:
    """One engine while things are timed on it."""

    def __init__(self, client: EngineClient, slot: DrafterSlot, sizes: Sizes) -> None:
        self.client = client
        self.sizes = sizes
        self.filler = Filler(client)
        self._slot = slot
        self._documents = {0: ""}
        self._plain: dict[int, Finished] = {}
        self._asked = 0

    def ask(
        self,
        question: str,
        max_tokens: int,
        *,
        document: str = "",
        drafter: StubDrafter | None = None,
        draft: DraftMode | None = None,
        draft_tokens: int | None = None,
    ) -> tuple[Finished, float]:
        """Return the end of a request, and the seconds from its first token to that.

        Args:
            question: Stands behind the document.
            max_tokens: Of the answer.
            document: Is remembered.
            drafter: Of the request, if it is to have one.
            draft: Instead of a drafter, which of the engine's own; `None` for none.
            draft_tokens: See `GenerateRequest`.
        """
        self._asked += 1
        if drafter is not None:
            self._slot.drafter = drafter
        request = GenerateRequest(
            f"bench-{self._asked}",
            self.filler.prompt(document, question),
            max_tokens=max_tokens,
            draft=draft or (DraftMode.OFF if drafter is None else DraftMode.AUTO),
            draft_tokens=draft_tokens,
            cache=bool(document),
        )

        async def timed() -> tuple[Finished, float]:
            """Leave out what a loop takes to begin and to end."""
            begun = time.perf_counter()
            finished = await self.client.complete(request)
            return finished, time.perf_counter() - begun - finished.timings.ttft_ms / 1000

        return asyncio.run(timed())

    def document(self, depth: int) -> str:
        """Return a document that fills a depth; it is read when it is first asked for."""
        if depth not in self._documents:
            fixed = self.client.count_tokens(self.filler.prompt("", ""))
            text = self.filler.text(depth - fixed, seed=depth)
            self.ask("?", 1, document=text)
            self._documents[depth] = text
        return self._documents[depth]

    def behind(
        self,
        depth: int,
        question: str,
        max_tokens: int,
        drafter: StubDrafter | None = None,
        draft: DraftMode | None = None,
        draft_tokens: int | None = None,
    ) -> tuple[Finished, float]:
        """Ask behind a filled depth; see `ask`.

        Raises:
            EngineError: The document was not remembered.
        """
        document = self.document(depth)
        finished, seconds = self.ask(
            question,
            max_tokens,
            document=document,
            drafter=drafter,
            draft=draft,
            draft_tokens=draft_tokens,
        )
        if document and finished.usage.cached_tokens < depth - 2 * PAGE_TOKENS:
            raise EngineError(
                f"of {depth} tokens only {finished.usage.cached_tokens} were remembered: the "
                "context is too small for this measurement"
            )
        return finished, seconds

    def plain(self, depth: int) -> Finished:
        """Decode without drafts as long as the longest run with drafts; once a depth."""
        if depth not in self._plain:
            longest = max(self.sizes.decode, max(VERIFIED_ROWS) * (self.sizes.steps + 2)) + 1
            self._plain[depth] = self.behind(depth, "?", longest)[0]
        return self._plain[depth]


def tokens_after_first(finished: Finished, least: int) -> int:
    """Return the tokens after the first; raises `EngineError` when the model ended too early."""
    count = len(finished.token_ids)
    if count < least:
        raise EngineError(f"the model ended after {count} tokens, {least} are needed to time it")
    return count - 1
