"""Speed of the engine on a card, at depths that are really filled, with llama.cpp's figures beside.

All is measured through the engine's client: reading includes admission and the first token, and
decoding includes sampling and emission. The prompts are random words.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ragflash.bench import llama_bench
from ragflash.bench.gpu_session import (
    ROOM_TOKENS,
    VERIFIED_ROWS,
    Figures,
    Session,
    Sizes,
    tokens_after_first,
)
from ragflash.bench.record import Measurement
from ragflash.bench.stub_drafter import DrafterSlot, StubDrafter
from ragflash.engine.build import start_engine
from ragflash.engine.cards import list_cards
from ragflash.engine.device import DeviceChoice
from ragflash.errors import EngineError, SettingInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.formats import KVFormatName
from ragflash.kvcache.planner import PREFILL_ROWS

Progress = Callable[[str, int, int], None]
Keep = Callable[[Measurement], None]

FULL = Sizes()
QUICK = Sizes(prefill=512, depth=4096, whole=4608, decode=32, steps=4, runs=1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        model: A model, as `GGUFFile.open` takes it.
        small: Another one, for the rows `small`.
        rows: Some of `ROWS`.
        device: As `start_engine` takes it; so are the next two.
        vram_bytes: Of the card.
        kv_format: Of keys and values.
        sizes: Tokens that are computed.
    """

    model: Path
    small: Path | None = None
    rows: Sequence[str] = ()
    device: DeviceChoice = "auto"
    vram_bytes: int | None = None
    kv_format: KVFormatName | Literal["auto"] = "tq3_0"
    sizes: Sizes = FULL


def time_decode(session: Session, figures: Figures, depth: int) -> None:
    """Decode plainly behind a depth."""
    rates = []
    session.behind(depth, "?", 4)  # for what is made at the first use
    for _ in range(session.sizes.runs):
        finished, seconds = session.behind(depth, "?", session.sizes.decode + 1)
        rates.append(tokens_after_first(finished, 2) / seconds)
    figures.add(f"decode_tok_s_depth{depth}", "tokens/s", rates)


def time_verify(session: Session, figures: Figures, depth: int, rows: int) -> None:
    """Verify drafts that are right, and drafts that are wrong."""
    plain, steps = session.plain(depth), session.sizes.steps
    tokens_after_first(plain, 3 * rows)
    vocab_size = 1 + max(plain.token_ids)
    lengths = {"": rows * (steps + 2), "_rejected": steps + rows + 2}
    for suffix, max_tokens in lengths.items():
        drafter = StubDrafter(
            plain.token_ids,
            plain.usage.prompt_tokens,
            rows - 1,
            vocab_size=vocab_size if suffix else None,
        )
        finished, _ = session.behind(depth, "?", max_tokens, drafter)
        times = drafter.step_times_ms()
        if not times:
            raise EngineError(f"no step verified {rows} rows: raise verify_rows")
        figures.add(f"verify{rows}{suffix}_ms_depth{depth}", "ms", times)
        taken = finished.timings.draft_n_accepted / max(1, finished.timings.draft_n)
        figures.add(f"verify{rows}{suffix}_accepted_share_depth{depth}", "of drafts", [taken])
    base = figures.series.get(f"verify{VERIFIED_ROWS[0]}_ms_depth{depth}")
    if rows != VERIFIED_ROWS[0] and base is not None:
        ratio = statistics.median(
            figures.series[f"verify{rows}_ms_depth{depth}"].values
        ) / statistics.median(base.values)
        figures.add(f"verify{rows}_ratio_to_verify16_depth{depth}", "times", [ratio])


def time_prefill(session: Session, figures: Figures, depth: int) -> None:
    """Read a question of known length behind a depth."""
    size, rates = session.sizes.prefill, []
    for run in range(session.sizes.runs + 1):
        question = session.filler.text(size, seed=run)
        timings = session.behind(depth, question, 1)[0].timings
        rates.append(1000 * timings.prompt_n / timings.prompt_ms)
    figures.add(f"prefill_tok_s_{size}_depth{depth}", "tokens/s", rates[1:])


def time_whole(session: Session, figures: Figures, depth: int) -> None:
    """Wait for the first token of a whole prompt, then verify drafts behind it; look at memory."""
    del depth
    size = session.sizes.whole
    question = session.filler.question_for("", size, seed=7)
    num_prompt = session.client.count_tokens(session.filler.prompt("", question))
    drafter = StubDrafter([0] * ROOM_TOKENS, num_prompt, max(VERIFIED_ROWS) - 1)
    finished, _ = session.ask(question, 2 * max(VERIFIED_ROWS), drafter=drafter)
    figures.add(f"ttft_{size}_s", "s", [finished.timings.ttft_ms / 1000])
    if session.client.info().device != "cpu":
        figures.add(f"peak_bytes_at_{size}", "bytes", [peak_bytes()])


def time_small(session: Session, figures: Figures, depth: int) -> None:
    """Decode with a small model, and read a short prompt."""
    size, rates, readings = session.sizes.small_prefill, [], []
    for run in range(session.sizes.runs + 1):
        finished, seconds = session.behind(depth, f"Tell {run} stories.", session.sizes.decode + 1)
        rates.append(tokens_after_first(finished, 2) / seconds)
        question = session.filler.question_for("", size, seed=run)
        timings = session.behind(depth, question, 1)[0].timings
        readings.append(1000 * timings.prompt_n / timings.prompt_ms)
    figures.add("small_decode_tok_s", "tokens/s", rates[1:])
    figures.add(f"small_prefill_tok_s_{size}", "tokens/s", readings[1:])


_SMALL = "small"
Row = Callable[[Session, Figures, int], None]
_AT_DEPTHS: Mapping[str, Row] = {
    "decode": time_decode,
    "verify16": lambda session, figures, depth: time_verify(session, figures, depth, 16),
    "verify21": lambda session, figures, depth: time_verify(session, figures, depth, 21),
    "prefill": time_prefill,
}
ROWS = (
    *(f"{name}_{where}" for where in ("start", "deep") for name in _AT_DEPTHS),
    *("whole", _SMALL),
)


def measure(plan: Plan, progress: Progress, keep: Keep = lambda _: None) -> Measurement:
    """Measure the rows of a plan, or all.

    Args:
        plan: What and how.
        progress: Called with what is done, how far it is, and out of how much.
        keep: Is given what there is after every row.

    Raises:
        SettingInvalid: A row has a name that is not known.
        DeviceError: The card cannot be used.
    """
    rows = [*plan.rows] or [row for row in ROWS if row != _SMALL or plan.small is not None]
    unknown = sorted(set(rows) - set(ROWS))
    if unknown or (_SMALL in rows and plan.small is None):
        raise SettingInvalid(
            f"rows {', '.join(unknown) or _SMALL}: known are {', '.join(ROWS)}, of which the last "
            "wants a small model besides"
        )
    measured = Measured(plan, llama_figures(plan, rows, progress))
    large = [row for row in rows if row != _SMALL]
    if large:
        measured.run(plan.model, large, progress, keep)
    if _SMALL in rows and plan.small is not None:
        measured.run(plan.small, [_SMALL], progress, keep)
    return measured.measurement()


def llama_figures(plan: Plan, rows: Sequence[str], progress: Progress) -> dict[str, list[float]]:
    """Return what llama.cpp reaches: measured now if it is there, or once on a card like ours."""
    sizes = plan.sizes
    found: dict[str, list[float]] = {}
    if not llama_bench.is_installed():
        with GGUFFile.open(plan.model) as file:
            is_same = file.require("general.architecture", str) == llama_bench.ARCHITECTURE
        if is_same and any(llama_bench.CARD in card.name for card in list_cards()):
            found = {name: [value] for name, value in llama_bench.MEASURED.items()}
        return found
    progress(llama_bench.PROGRAM, 0, 0)
    for where, depth, kv_format in (("start", 0, "f16"), ("deep", sizes.depth, "q8_0")):
        if any(row.endswith(where) for row in rows):
            found |= llama_bench.measure(
                plan.model,
                kv_format=kv_format,
                depths=[depth],
                prefill=sizes.prefill,
                decode=sizes.decode,
                runs=sizes.runs,
            )
    return found


class Measured:
    """What was found so far, and where it comes from."""

    def __init__(self, plan: Plan, peers: Mapping[str, Sequence[float]]) -> None:
        self._plan = plan
        self._figures = Figures(peers)
        self._parameters: dict[str, Any] = {
            "sizes": asdict(plan.sizes),
            "vram_bytes": plan.vram_bytes,
            "llamacpp": "measured in this call"
            if llama_bench.is_installed()
            else dict(llama_bench.MEASURED_HOW),
        }
        self._model: dict[str, str] = {}

    def run(
        self,
        path: Path,
        rows: Sequence[str],
        progress: Progress,
        keep: Keep,
    ) -> None:
        """Start an engine and measure rows on it."""
        sizes, is_small = self._plan.sizes, rows == [_SMALL]
        slot = DrafterSlot()
        progress(f"loading {path.name}", 0, 0)
        client = start_engine(
            path,
            device=self._plan.device,
            vram_bytes=None if is_small else self._plan.vram_bytes,
            context_tokens=None if is_small else sizes.context,
            kv_format="auto" if is_small else self._plan.kv_format,
            max_slots=1,
            prefill_chunk_tokens=PREFILL_ROWS,
            verify_rows=max(VERIFIED_ROWS),
            drafter_factory=slot,
        )
        with closing(client):
            info = client.info()
            self._parameters[_SMALL if is_small else "engine"] = asdict(info)
            self._model = self._model or {"file": info.model, "sha256": info.model_hash}
            session = Session(client, slot, sizes)
            for number, row in enumerate(rows):
                progress(row, number, len(rows))
                name, _, where = row.rpartition("_")
                function = _AT_DEPTHS.get(name) or {"whole": time_whole, _SMALL: time_small}[row]
                function(session, self._figures, sizes.depth if where == "deep" else 0)
                keep(self.measurement())
            progress("done", len(rows), len(rows))

    def measurement(self) -> Measurement:
        """Return what there is."""
        return Measurement(
            series=dict(self._figures.series),
            threads=torch.get_num_threads(),
            parameters=self._parameters,
            model=self._model or None,
            is_flat=True,
        )


def peak_bytes() -> float:
    """Return the most that this process held of the card: torch's allocator and the context.

    The context is what the driver counts beyond the allocator, less what was there before.
    """
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    return float(torch.cuda.max_memory_reserved() + context)
