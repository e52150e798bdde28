"""The `move-store` command."""

from typing import Annotated

import typer

from ragflash.cli import parts
from ragflash.cli.options import DataDirOption, JsonOption
from ragflash.cli.output import Output
from ragflash.settings import load_settings

__all__ = ["move_store"]


def move_store(
    *,
    back: Annotated[
        bool, typer.Option("--back", help="From the server into the data folder.")
    ] = False,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the vectors from the data folder to the Qdrant server of RAGFLASH_QDRANT_URL.

    A move that was interrupted is continued by the next. Vectors are deleted where they were only
    after every document's have been counted where they are now. Texts, originals and the catalogue
    stay in the data folder.
    """
    with Output(as_json=as_json) as output:
        settings = load_settings(data_dir=data_dir)
        with output.progress() as track:
            moved = parts.move_store(
                settings,
                back=back,
                report=lambda done, total: track("documents moved", done, total),
            )
        place = "the data folder" if back else str(settings.qdrant_url)
        if moved.was_there:
            output.say(f"the vectors are in {place} already")
        else:
            output.say(f"{moved.points} vectors of {moved.documents} documents are in {place} now")
        if back:
            output.say("unset RAGFLASH_QDRANT_URL before you start ragflash again")
        output.result(
            {
                "store": "embedded" if back else "server",
                "documents": moved.documents,
                "points": moved.points,
                "copied_documents": moved.copied,
                "was_there": moved.was_there,
            }
        )
