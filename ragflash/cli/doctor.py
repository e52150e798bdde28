"""The `doctor` command: what is missing, and how to get it."""

from dataclasses import asdict

import typer

from ragflash.cli.options import DataDirOption, JsonOption, ModelOption
from ragflash.cli.output import Output
from ragflash.settings import load_settings


def doctor(
    *, data_dir: DataDirOption = None, model: ModelOption = None, as_json: JsonOption = False
) -> None:
    """Check this machine and its settings, changing nothing.

    The exit code is 1 when something keeps ragflash from working.
    """
    from ragflash.cli.checks import Level, examine  # noqa: PLC0415  (reads models: slow to import)

    with Output(as_json=as_json) as output:
        settings = load_settings(data_dir=data_dir, model=model)
        findings = []
        for finding in examine(settings):
            findings.append(finding)
            output.say(f"{finding.level:4} {finding.name}: {finding.said}")
            if finding.advice:
                output.say(f"     → {finding.advice}")
        works = all(finding.level is not Level.FAIL for finding in findings)
        output.result({"ok": works, "checks": [asdict(finding) for finding in findings]})
    if not works:
        raise typer.Exit(1)
