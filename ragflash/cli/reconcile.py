"""The `reconcile` command: put right what a crash left, or show it."""

from dataclasses import asdict
from typing import Annotated

import typer

from ragflash.cli.options import DataDirOption, JsonOption
from ragflash.cli.output import Output
from ragflash.cli.parts import repair
from ragflash.settings import load_settings

_TOLD = {
    "erased": ("documents whose deletion had begun", "erased"),
    "orphan_points": ("documents with points that nobody owns", "points removed"),
    "orphan_files": ("files that no document needs", "removed"),
    "left_overs": ("half-written files", "removed"),
    "requeued": ("incomplete documents", "queued again"),
    "lost": ("documents whose original is gone", "left as they are"),
}


def reconcile(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be done.")
    ] = False,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare catalogue, vectors and files, and put right what differs.

    Most of it happens at every start; here every document's points are counted too. Documents
    that are queued again are read when a server or another command is started.
    """
    with Output(as_json=as_json) as output:
        found = asdict(repair(load_settings(data_dir=data_dir), dry_run=dry_run))
        for name, (what, done) in _TOLD.items():
            if found[name]:
                outcome = "found" if dry_run else done
                output.say(f"{len(found[name])} {what}: {outcome}")
                output.say("".join(f"  {item}\n" for item in found[name]).rstrip("\n"))
        if not any(found.values()):
            output.say("everything is in line")
        output.result({"dry_run": dry_run, **found})
