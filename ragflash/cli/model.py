"""The `model` commands: fetch model files, say what is in them and what memory they take."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from ragflash.bench import record
from ragflash.bench.provenance import provenance
from ragflash.cli import parts
from ragflash.cli.demo import GUIDE
from ragflash.cli.options import DataDirOption, DeviceOption, JsonOption, VramOption
from ragflash.cli.output import Output
from ragflash.errors import ContextTooLong, ModelError, SettingInvalid
from ragflash.kvcache import planner
from ragflash.kvcache.formats import KV_FORMATS, KVFormatName
from ragflash.samples import sample_path
from ragflash.settings import load_settings

__all__ = ["app"]

app = typer.Typer(help="Fetch model files, and see what is in them.", no_args_is_help=True)

_GIB = 1 << 30
ModelArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A GGUF file, or a shape such as qwen35-27b.")
]


@app.command()
def pull(
    reference: Annotated[str, typer.Argument(metavar="REPO[:QUANT]", help="On the model hub.")],
    *,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model's file or parts; one that was interrupted goes on where it stopped.

    Without QUANT: Q4_K_M where there is one. HF_TOKEN and HF_ENDPOINT are heeded.
    """
    from ragflash.cli.hub import pull as fetch  # noqa: PLC0415  (slow to import)

    with Output(as_json=as_json) as output:
        folder = load_settings(data_dir=data_dir).data_dir / "models"
        with output.progress() as track:
            path = fetch(reference, folder, report=track)
        output.say(f"{path}\nSet RAGFLASH_MODEL to this path, or pass it as --model.")
        output.result({"path": str(path), "bytes": path.stat().st_size})


@app.command("list")
def list_models(*, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """List the models that were pulled, and the packaged one."""
    from ragflash.cli.models import describe, installed  # noqa: PLC0415  (imports torch)

    with Output(as_json=as_json) as output:
        path_column = Column("model", overflow="fold")  # to be copied whole
        table = Table(path_column, "architecture", "weights", "GB", "context", box=None)
        models = []
        for path in installed(load_settings(data_dir=data_dir).data_dir / "models"):
            try:
                found = describe(path)
            except ModelError as error:
                output.complain(f"{path}: {error.detail}")
                continue
            models.append(found)
            table.add_row(
                found["path"],
                found["architecture"],
                found["weights"],
                f"{found['bytes'] / 1e9:.2f}",
                str(found["context_tokens"]),
            )
        output.show(table)
        output.result({"models": models})


@app.command()
def show(model: ModelArgument, *, as_json: JsonOption = False) -> None:
    """Say what a model file is, without loading it."""
    from ragflash.cli.models import describe, named  # noqa: PLC0415  (imports torch)

    with Output(as_json=as_json) as output:
        found = describe(named(model))
        for key, value in found.items():
            output.say(f"{key.replace('_', ' '):24} {value}")
        output.result(found)


@app.command()
def plan(
    model: ModelArgument,
    *,
    vram: Annotated[float, typer.Option(help="Memory of the card, or what is free, in GiB.")] = 24,
    ctx: Annotated[int, typer.Option(help="Tokens of context.")] = 138_696,
    kv: Annotated[str, typer.Option(help="Format of keys and values.")] = "tq3_0",
    slots: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    drafter: Annotated[Path | None, typer.Option(help="A DFlash drafter's GGUF file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a model takes of a card's memory, and what each option costs in context.

    The exit code is 1 when it does not fit.
    """
    from ragflash.cli.models import named_shape, shape_of_drafter  # noqa: PLC0415  (imports torch)

    with Output(as_json=as_json) as output:
        sizes = {"vram": vram, "ctx": ctx, "slots": slots}
        for name, value in sizes.items():
            if not 0 < value < inf:
                raise SettingInvalid(f"--{name} {value} must be a positive number")
        options = planner.PlanOptions(int(vram * _GIB), ctx, _kv_format(kv), slots=slots)
        options = replace(options, drafter=shape_of_drafter(drafter))
        shape = named_shape(model)
        if ctx > shape.context_tokens:
            raise ContextTooLong(
                f"{shape.name} was trained for {shape.context_tokens} tokens, not {ctx}",
                limit_tokens=shape.context_tokens,
            )
        planned = planner.plan_memory(shape, options)
        most = planner.most_context_tokens(shape, options)
        others = planner.alternatives(shape, options)
        _print_plan(output, planned, most, others)
        output.result(
            {
                "model": shape.name,
                "fits": planned.fits,
                "vram_bytes": options.vram_bytes,
                "total_bytes": planned.total_bytes,
                "left_bytes": planned.left_bytes,
                "context_tokens": ctx,
                "most_context_tokens": most,
                "parts": {part.name: part.num_bytes for part in planned.parts},
                "host_weight_bytes": shape.host_weight_bytes,
                "host_pinned_bytes": planner.pinned_bytes(shape),
                "alternatives": dict(others),
            }
        )
    if not planned.fits:
        raise typer.Exit(1)


@app.command()
def check(
    model: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.")],
    *,
    kv: Annotated[
        list[str] | None, typer.Option(help="Only this format; repeatable. All if left out.")
    ] = None,
    ctx: Annotated[
        list[int] | None, typer.Option(help="Tokens of a text; repeatable. 7500 and 30000.")
    ] = None,
    codes: Annotated[int, typer.Option(min=1, help="Codes to be copied at each length.")] = 200,
    device: DeviceOption = None,
    vram_gb: VramOption = None,
    data_dir: DataDirOption = None,
    out: Annotated[Path | None, typer.Option(help="Also write the result to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what storing keys and values in fewer bits does to a model, against f16.

    The smallest format that passes is what `RAGFLASH_KV_FORMAT=auto` takes for the file from then
    on, if all were measured.
    """
    with Output(as_json=as_json) as output:
        from ragflash.bench import kv_quality  # noqa: PLC0415  (imports torch: seconds)
        from ragflash.cli.models import named  # noqa: PLC0415
        from ragflash.models.known_formats import remember_format  # noqa: PLC0415

        settings = load_settings(data_dir=data_dir, device=device, vram_gb=vram_gb)
        begun = provenance()
        sizes = kv_quality.Sizes(codes=codes)
        with output.progress() as track:
            found = kv_quality.check(
                named(str(model)),
                sample_path(GUIDE).read_text(encoding="utf-8"),
                formats=[_kv_format(name) for name in kv or ()],
                device=settings.device,
                vram_bytes=parts.vram_bytes(settings),
                sizes=replace(sizes, contexts=tuple(ctx)) if ctx else sizes,
                progress=track,
            )
        output.show(_quality_table(found["rows"]))
        output.say(f"\nThe smallest format that passes: {found['best']}")
        if not kv and not ctx:
            folder = settings.data_dir / "cache"
            remember_format(found["sha256"], found["model"], found["best"], folder)
        result = {**begun, **found}
        output.result(result)
        if out is not None:
            record.write(out, result)


def _quality_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("format", "tokens", "mean KL", "99 % KL", "codes copied", "with f16", "")
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(
            row["kv_format"],
            f"{row['context_tokens']:,}",
            f"{row['mean_kl']:.2e}",
            f"{row['tail_kl']:.2e}",
            f"{row['copied']:.3f}",
            f"{row['copied_exact']:.3f}",
            "passes" if row["passes"] else "loses too much",
        )
    return table


def _kv_format(name: str) -> KVFormatName:
    for known in KV_FORMATS:
        if name == known:
            return known
    raise SettingInvalid(f"--kv {name}: known are {', '.join(KV_FORMATS)}")


def _print_plan(
    output: Output,
    planned: planner.MemoryPlan,
    most: int,
    others: list[tuple[str, int]],
) -> None:
    """Show the table, the verdict, and what else fits."""
    shape, options = planned.shape, planned.options
    output.say(f"{shape.name}, {options.context_tokens:,} tokens of context\n")
    table = Table("part", "GiB", "bytes", "", box=None)
    for part in planned.parts:
        kind = "allowance" if part.is_estimate else ""
        table.add_row(part.name, f"{part.num_bytes / _GIB:.3f}", f"{part.num_bytes:,}", kind)
    for name, num_bytes in (("total", planned.total_bytes), ("the card", options.vram_bytes)):
        table.add_row(name, f"{num_bytes / _GIB:.3f}", f"{num_bytes:,}")
    output.show(table)
    plain, packed = (planner.kv_bytes(shape, 32, name) for name in ("f16", options.kv_format))
    if packed != plain:
        output.say(f"\nKeys and values take {plain / packed:.2f} times less than in f16.")
    held, pinned = shape.host_weight_bytes / _GIB, planner.pinned_bytes(shape) / _GIB
    output.say(
        f"\nOf the computer's own memory {held:.3f} GiB hold embeddings, and {pinned:.3f} GiB are "
        "pinned where prompts are kept in files."
    )
    if planned.fits:
        left = planned.left_bytes / _GIB
        output.say(f"\nIt fits; {left:.2f} GiB are left, enough for {most:,} tokens of context.")
    else:
        lacking = -planned.left_bytes / _GIB
        said = f"at most {most:,} tokens of context fit" if most else "no context at all fits"
        output.say(f"\nIt does not fit: {lacking:.2f} GiB are lacking; {said}.")
    output.say("\nWith another option, the context that fits:")
    costs = Table("option", "tokens", "difference", box=None)
    for name, num_tokens in others:
        costs.add_row(name, f"{num_tokens:,}", f"{num_tokens - most:+,}")
    output.show(costs)
