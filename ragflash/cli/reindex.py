"""The `reindex` command."""

from ragflash.cli import parts
from ragflash.cli.options import DataDirOption, JsonOption
from ragflash.cli.output import Output
from ragflash.settings import load_settings

__all__ = ["reindex"]


def reindex(*, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Embed all documents again, after RAGFLASH_EMBED_MODEL has changed.

    Nothing is read again: texts and passages are stored. A run that was interrupted is continued by
    the next; until all is done, the former model can be configured again.
    """
    with Output(as_json=as_json) as output:
        with output.progress() as track:
            done = parts.embed_again(
                load_settings(data_dir=data_dir),
                report=lambda done, total: track("passages embedded", done, total),
            )
        if done.former:
            output.say(f"{done.passages} passages of {done.documents} documents are embedded anew")
        else:
            output.say("all documents are embedded with the configured model already")
        output.result(
            {
                "former_models": list(done.former),
                "documents": done.documents,
                "passages": done.passages,
                "embedded_passages": done.embedded,
            }
        )
