"""`ragflash bench drafting`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ragflash.bench import record
from ragflash.bench.provenance import provenance
from ragflash.cli import parts
from ragflash.cli.bench_run import run_kept
from ragflash.cli.demo import MANUAL
from ragflash.cli.options import DeviceOption, JsonOption, ModelOption, VramOption
from ragflash.cli.output import Tracker
from ragflash.errors import SettingInvalid
from ragflash.samples import sample_path
from ragflash.settings import load_settings

__all__ = ["drafting"]

_PROSE = "GPL-3.txt"


QuickOption = Annotated[bool, typer.Option("--quick", help="Two tasks, one short document.")]
TaskOption = Annotated[
    list[str] | None,
    typer.Option(help="copy, quote, list, rewrite, summary, free, or none; repeatable."),
]
ContextOption = Annotated[
    list[int] | None, typer.Option(help="Tokens of a document and a question; repeatable.")
]
LengthOption = Annotated[
    int | None, typer.Option(min=2, help="Of every answer; what fits its task if left out.")
]
RoundsOption = Annotated[int, typer.Option(min=record.LEAST_PAIRS, help="Answers of each kind.")]
TextOption = Annotated[
    Path | None, typer.Option(help="Plain prose that is asked about; the GPL if left out.")
]
PeerOption = Annotated[
    bool, typer.Option("--peer", help="llama.cpp's lookups beside, if it is installed.")
]
LargeOption = Annotated[
    Path | None, typer.Option(help="A large model whose steps are timed besides.")
]
LargeDrafterOption = Annotated[Path | None, typer.Option(help="Its DFlash drafter.")]
DepthOption = Annotated[
    list[int] | None, typer.Option(help="Tokens before the large model's steps; repeatable.")
]
BesideOption = Annotated[
    Path | None, typer.Option(help="Result of another device, to be kept in this one.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the rows that --out lacks.")
]
OutOption = Annotated[
    Path | None, typer.Option(help="File for the result and all samples, after every row.")
]


def drafting(
    *,
    quick: QuickOption = False,
    task: TaskOption = None,
    ctx: ContextOption = None,
    output_tokens: LengthOption = None,
    rounds: RoundsOption = record.LEAST_PAIRS,
    text: TextOption = None,
    peer: PeerOption = False,
    large: LargeOption = None,
    large_drafter: LargeDrafterOption = None,
    depth: DepthOption = None,
    beside: BesideOption = None,
    resume: ResumeOption = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    vram_gb: VramOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time six tasks with drafts from each source and without, alternately."""

    def run(track: Tracker, keep: Callable[[record.Measurement], None]) -> record.Measurement:
        from ragflash.bench import draft_steps  # noqa: PLC0415  (imports torch: seconds)
        from ragflash.bench import drafting as bench  # noqa: PLC0415

        if resume and out is None:
            raise SettingInvalid("--resume goes on with a result: name its file with --out")
        settings = load_settings(
            model=model, device=device, vram_gb=vram_gb, max_slots=1, draft="auto"
        )
        steps = (
            None
            if large is None
            else draft_steps.Plan(
                model=large,
                drafter=large_drafter,
                device=settings.device,
                vram_bytes=parts.vram_bytes(settings),
                depths=depth or draft_steps.DEPTHS,
            )
        )
        plan = bench.plan_of(
            (text or sample_path(MANUAL).with_name(_PROSE)).read_text(encoding="utf-8"),
            quick=quick,
            tasks=task or (),
            contexts=ctx or (),
            output_tokens=output_tokens,
            rounds=rounds,
            large=steps,
            peer_model=parts.model_path(settings) if peer else None,
        )
        options = {
            "begun": provenance(),
            "earlier": bench.read(out) if resume and out else None,
            "beside": bench.read(beside) if beside else None,
        }
        return bench.measure(plan, lambda: parts.start_model(settings), track, keep, **options)

    run_kept("drafting", run, out=out, as_json=as_json)
