"""What looking drafts up adds to the steps of a large model behind a long document.

Its weights may be random: what is proposed is what a plain run wrote, so that drafts hold, and the
lookup beside it follows a copy of the document as long as the output, so that it has its work to
do. Steps are whole ones, choice, commit and emission included.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ragflash.bench.gpu_session import Figures, Session, Sizes, tokens_after_first
from ragflash.bench.record import Series
from ragflash.bench.stub_drafter import DrafterSlot, StubDrafter
from ragflash.engine.build import start_engine
from ragflash.engine.device import DeviceChoice
from ragflash.errors import EngineError
from ragflash.kvcache.formats import KVFormatName
from ragflash.kvcache.planner import PREFILL_ROWS
from ragflash.speculative.drafter import Draft
from ragflash.speculative.lookup import LookupDrafter, SourceIndex

DEPTHS = (0, 32_768, 138_696)
ROWS = 16

Progress = Callable[[str, int, int], None]


@dataclass(slots=True, kw_only=True)
class SeekingDrafter(StubDrafter):
    """Looks up a copy of the source that grows with the output, and proposes the known tokens.

    Attributes:
        lookup: Made with the source as its prompt.
        source: Tokens of the document.
        copied: The source, and behind it what is copied of it again.
        seek_us: What each lookup took.
    """

    lookup: LookupDrafter
    source: Sequence[int]
    copied: list[int]
    seek_us: list[float] = field(default_factory=list)

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        num_written = len(history) - self.num_prompt
        num_copied = len(self.copied) - len(self.source)
        self.copied += self.source[num_copied:num_written]
        began_at = time.perf_counter()
        self.lookup.propose(self.copied, budget)
        self.seek_us.append(1e6 * (time.perf_counter() - began_at))
        # Called by name: a dataclass with slots is another class than the one `super()` knows.
        return StubDrafter.propose(self, history, budget)


def measure(
    model: Path,
    progress: Progress,
    *,
    device: DeviceChoice = "auto",
    vram_bytes: int | None = None,
    kv_format: KVFormatName | Literal["auto"] = "tq3_0",
    depths: Sequence[int] = DEPTHS,
    steps: int = 16,
    runs: int = 3,
) -> dict[str, Series]:
    """Time steps of 16 rows with known drafts, and with lookups besides, alternately.

    Args:
        model: As `GGUFFile.open` takes it.
        progress: Called with what is done, how far it is, and out of how much.
        device: As `start_engine` takes it; so are the next two.
        vram_bytes: Of the card.
        kv_format: Of keys and values.
        depths: Tokens of documents.
        steps: Of a run.
        runs: Of each kind at each depth.

    Raises:
        EngineError: The context is too small, or the model ended too early.
    """
    deepest = max(depths)
    sizes = Sizes(prefill=ROWS * steps, depth=deepest, whole=deepest, decode=1, steps=steps)
    slot = DrafterSlot()
    progress(f"loading {model.name}", 0, 0)
    client = start_engine(
        model,
        device=device,
        vram_bytes=vram_bytes,
        context_tokens=sizes.context,
        kv_format=kv_format,
        max_slots=1,
        prefill_chunk_tokens=PREFILL_ROWS,
        verify_rows=ROWS,
        drafter_factory=slot,
    )
    figures = Figures({})
    with closing(client):
        session = Session(client, slot, sizes)
        for number, depth in enumerate(depths):
            progress(f"steps behind {depth} tokens", number, len(depths))
            _time(session, figures, depth, runs)
        progress("done", len(depths), len(depths))
    return figures.series


def _time(session: Session, figures: Figures, depth: int, runs: int) -> None:
    plain = session.plain(depth)
    max_tokens = ROWS * (session.sizes.steps + 2)
    tokens_after_first(plain, max_tokens)
    source = session.client.tokenize(session.document(depth)) or plain.token_ids
    index = SourceIndex.build(source)
    known: list[float] = []
    sought: list[float] = []
    seek_us: list[float] = []
    for _ in range(runs):
        drafter = StubDrafter(plain.token_ids, plain.usage.prompt_tokens, ROWS - 1)
        session.behind(depth, "?", max_tokens, drafter)
        known += drafter.step_times_ms()
        seeking = SeekingDrafter(
            plain.token_ids,
            plain.usage.prompt_tokens,
            ROWS - 1,
            lookup=LookupDrafter([index], source, written_from=len(source)),
            source=source,
            copied=[*source],
        )
        session.behind(depth, "?", max_tokens, seeking)
        sought += seeking.step_times_ms()
        seek_us += seeking.seek_us[1:]  # behind the first, which reads the source
    if not known or not sought:
        raise EngineError(f"no step behind {depth} tokens verified {ROWS} rows")
    extra = statistics.median(sought) - statistics.median(known)
    figures.add(f"verify{ROWS}_ms_depth{depth}", "ms", known)
    figures.add(f"verify{ROWS}_with_draft_ms_depth{depth}", "ms", sought)
    figures.add(f"draft_extra_ms_depth{depth}", "ms", [extra])
    figures.add(f"seek_us_depth{depth}", "us", seek_us)
