"""The `ragflash` command and its subcommands."""

import typer

from ragflash import __version__
from ragflash.cli import (
    ask,
    bench,
    demo,
    doctor,
    documents,
    evaluate,
    model,
    move,
    reconcile,
    reindex,
    serve,
    sessions,
)
from ragflash.cli.options import JsonOption
from ragflash.cli.output import Output

__all__ = ["app"]

app = typer.Typer(
    help="Ask documents and get answers with quotes that are really in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve.serve)
app.command()(documents.ingest)
app.command()(ask.ask)
app.command()(documents.search)
app.add_typer(documents.app, name="documents")
app.add_typer(sessions.app, name="sessions")
app.command()(reconcile.reconcile)
app.command()(reindex.reindex)
app.command("move-store")(move.move_store)
app.command("eval")(evaluate.evaluate)
app.command()(demo.demo)
app.command()(doctor.doctor)
app.add_typer(model.app, name="model")
app.add_typer(bench.app, name="bench")


@app.command()
def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    with Output(as_json=as_json) as output:
        output.say(__version__)
        output.result({"version": __version__})
