"""The `bench` commands: measure, show the summary, keep the result file.

A benchmark is a module of `ragflash.bench` with a `measure` function, and a command here that
calls it through `run_bench`.
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Literal

import typer

from ragflash.bench import record
from ragflash.cli import parts
from ragflash.cli.bench_drafting import drafting
from ragflash.cli.bench_run import run_bench, run_kept
from ragflash.cli.demo import GUIDE, GUIDE_QUESTIONS, MANUAL
from ragflash.cli.options import (
    CtxOption,
    DeviceOption,
    JsonOption,
    KvFormat,
    KvOption,
    ModelOption,
    SlotsOption,
    VramOption,
)
from ragflash.cli.output import Output, Tracker
from ragflash.errors import NotFound
from ragflash.gguf.packaged import packaged_model_path
from ragflash.samples import sample_path
from ragflash.settings import load_settings

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
app.command()(drafting)

WeightForm = Literal["dense", "packed"]
OutOption = Annotated[
    Path | None, typer.Option(help="Also write the result, with all samples, to this file.")
]


@app.command()
def ingest(
    document: Annotated[
        Path | None, typer.Argument(help="File to read; the sample manual if left out.")
    ] = None,
    *,
    runs: Annotated[int, typer.Option(min=1, help="How often it is parsed.")] = 10,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Parse a document, embed its passages, and read it into a library."""

    def run(track: Tracker) -> record.Measurement:
        from ragflash.bench import ingest as bench  # noqa: PLC0415  (loads the store)

        path = document or sample_path(MANUAL)
        if not path.is_file():
            raise NotFound(f"there is no file {path}")
        with tempfile.TemporaryDirectory(prefix="ragflash-bench-") as folder:
            return bench.measure(
                path, parts.make_embedder(load_settings()), Path(folder), runs, track
            )

    run_bench("ingest", run, out=out, as_json=as_json)


@app.command()
def search(
    *,
    documents: Annotated[
        int, typer.Option(min=10, help="Documents of 250 passages each, made up.")
    ] = 400,
    queries: Annotated[int, typer.Option(min=1, help="Searches of each kind.")] = 200,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search a large library that is made up, open it, and delete from it."""

    def run(track: Tracker) -> record.Measurement:
        from ragflash.bench import search as bench  # noqa: PLC0415  (loads the store)

        with tempfile.TemporaryDirectory(prefix="ragflash-bench-") as folder:
            return bench.measure(Path(folder), documents, queries, track)

    run_bench("search", run, out=out, as_json=as_json)


@app.command()
def ask(
    *,
    runs: Annotated[
        int, typer.Option(min=record.LEAST_PAIRS, help="Pairs of first and second questions.")
    ] = record.LEAST_PAIRS,
    model: ModelOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time questions about a sample document that is read, and that is not read yet."""

    def run(track: Tracker) -> record.Measurement:
        from ragflash.bench import ask as bench  # noqa: PLC0415  (loads the store)

        with tempfile.TemporaryDirectory(prefix="ragflash-bench-") as folder:
            # What is forgotten every other time must not come back from a file.
            settings = load_settings(data_dir=Path(folder), model=model, sessions_gb=0)
            with parts.library_and_engine(settings) as (library, client):
                assert client is not None
                return bench.measure(
                    library, client, sample_path(GUIDE), GUIDE_QUESTIONS[0], runs, track
                )

    run_bench("ask", run, out=out, as_json=as_json)


@app.command()
def sessions(
    *,
    pairs: Annotated[
        int, typer.Option(min=record.LEAST_PAIRS, help="Readings of each figure.")
    ] = record.LEAST_PAIRS,
    restarts: Annotated[
        int | None, typer.Option(min=1, help="Readings from files; --pairs if left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1000, help="Of the document.")] = 6000,
    short: Annotated[int, typer.Option(min=10, help="Of documents whose writing is timed.")] = 384,
    folder: Annotated[
        Path | None, typer.Option(help="On the disk that is meant; a temporary one if left out.")
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    vram_gb: VramOption = None,
    ctx: CtxOption = None,
    kv: KvOption = None,
    slots: SlotsOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time questions about a document that is unread, in memory, and in a file after a restart."""

    def run(track: Tracker) -> record.Measurement:
        from ragflash.bench import sessions as bench  # noqa: PLC0415  (imports torch: seconds)

        with tempfile.TemporaryDirectory(prefix="ragflash-bench-", dir=folder) as made:
            settings = load_settings(
                data_dir=Path(made),
                model=model,
                device=device,
                vram_gb=vram_gb,
                context_tokens=ctx,
                kv_format=kv,
                max_slots=slots,
            )
            path = Path(made) / "sessions"

            def start() -> AbstractContextManager[bench.Running]:
                return bench.run_over(path, lambda archive: parts.start_model(settings, archive))

            sizes = bench.Sizes(
                document_tokens=tokens, short_tokens=short, pairs=pairs, restarts=restarts or pairs
            )
            return bench.measure(start, path, sizes, track)

    run_bench("sessions", run, out=out, as_json=as_json)


@app.command()
def lookup(
    *,
    runs: Annotated[
        int, typer.Option(min=1, help="Texts of each kind, and indexes built.")
    ] = record.LEAST_PAIRS,
    model: ModelOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Index 138,696 tokens of the samples, and look up what is quoted, edited and free of them."""

    def run(track: Tracker) -> record.Measurement:
        from ragflash.bench import lookup as bench  # noqa: PLC0415  (loads parsers)

        return bench.measure(
            [sample_path(name) for name in (MANUAL, "sqlite-wal.html")],
            sample_path(GUIDE),
            parts.model_path(load_settings(model=model)),
            bench.Sizes(runs=runs),
            track,
        )

    run_bench("lookup", run, out=out, as_json=as_json)


@app.command()
def quotes(
    *,
    runs: Annotated[
        int, typer.Option(min=1, help="How often it is measured.")
    ] = record.LEAST_PAIRS,
    model: ModelOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time what binding quotes to 138,696 tokens of the samples costs, without a model."""

    def run(track: Tracker) -> record.Measurement:
        from ragflash.bench import quotes as bench  # noqa: PLC0415  (loads parsers)

        documents = [sample_path(name) for name in (MANUAL, "sqlite-wal.html")]
        path = parts.model_path(load_settings(model=model))
        return bench.measure(documents, path, bench.Sizes(runs=runs), track)

    run_bench("quotes", run, out=out, as_json=as_json)


@app.command()
def cpu(
    *,
    pairs: Annotated[
        int, typer.Option(min=record.LEAST_PAIRS, help="Readings of each figure.")
    ] = record.LEAST_PAIRS,
    weights: Annotated[
        WeightForm | None, typer.Option(help="Whether they stay packed. [env: RAGFLASH_WEIGHTS]")
    ] = None,
    model: ModelOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time prompts and decoding, beside llama.cpp if llama-cpp-python is installed; and memory."""

    def run(track: Tracker) -> record.Measurement:
        from ragflash.bench import cpu as bench  # noqa: PLC0415  (imports torch: seconds)

        settings = load_settings(model=model, weights=weights)
        return bench.measure(
            parts.model_path(settings),
            threads=settings.threads or os.cpu_count() or 1,
            pairs=pairs,
            progress=track,
            dtype=settings.dtype,
            weights=settings.weights,
        )

    from ragflash.bench import peer  # noqa: PLC0415  (numpy)

    run_bench("cpu", run, out=out, as_json=as_json)
    if not as_json and not peer.is_installed():
        typer.echo(f"for ratios to llama.cpp: pip install {peer.PACKAGE}", err=True)


@app.command()
def gpu(
    *,
    model: ModelOption = None,
    small: Annotated[
        Path | None, typer.Option(help="A small model besides; the packaged one if left out.")
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option(help="Only this row of the table; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short prompts, one reading.")] = False,
    device: DeviceOption = None,
    vram_gb: VramOption = None,
    kv: Annotated[KvFormat, typer.Option(help="Format of keys and values.")] = KvFormat.TQ3_0,
    commit: Annotated[
        str, typer.Option(help="That the files are of, where they are a copy of a checkout.")
    ] = "",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time a model on a card, at depths up to 138,696 tokens, beside llama.cpp.

    With llama-bench on PATH that is measured in the same call; else its figures for the 27B shape
    on an H200 stand beside those of such a card. --out is written after every row.
    """

    def run(track: Tracker, keep: Callable[[record.Measurement], None]) -> record.Measurement:
        from ragflash.bench import gpu as bench  # noqa: PLC0415  (imports torch: seconds)

        settings = load_settings(model=model, device=device, vram_gb=vram_gb)
        plan = bench.Plan(
            parts.model_path(settings),
            small=small or packaged_model_path(),
            rows=rows or (),
            device=settings.device,
            vram_bytes=parts.vram_bytes(settings),
            kv_format=kv.value,
            sizes=bench.QUICK if quick else bench.FULL,
        )
        return bench.measure(plan, track, keep)

    run_kept("gpu", run, out=out, as_json=as_json, commit=commit)


@app.command()
def make_model(
    shape: Annotated[str, typer.Argument(help="Such as qwen35-27b.")],
    *,
    mtp: Annotated[bool, typer.Option("--mtp", help="With multi-token prediction.")] = False,
    layers: Annotated[
        int | None, typer.Option(help="Fewer layers, for small machines; a multiple of 4.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same gives the same bytes.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File to write; SHAPE.gguf if left out.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model file of a known shape with random weights, to repeat figures of speed with.

    What it says means nothing. The whole of qwen35-27b takes 16.5 GB.
    """
    with Output(as_json=as_json) as output:
        from ragflash.bench import make_model as maker  # noqa: PLC0415  (imports torch: seconds)

        path = out or Path(f"{shape}.gguf")
        begun = time.monotonic()
        with output.progress() as track:
            made = maker.make_model(
                shape, path, num_layers=layers, mtp=mtp, seed=seed, force=force, progress=track
            )
        took_s = time.monotonic() - begun
        num_bytes = path.stat().st_size
        output.say(
            f"{path}: {num_bytes / 1e9:.2f} GB, {len(made.tensors)} tensors, seed {seed}, "
            f"written in {took_s:.1f} s"
        )
        output.result(
            {"path": str(path), "bytes": num_bytes, "tensors": len(made.tensors), "seed": seed}
        )
