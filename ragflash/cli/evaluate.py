"""The `eval` command: scores a set of questions in a data folder of its own."""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ragflash.api.schemas import EngineOut
from ragflash.bench.provenance import provenance
from ragflash.cli.ask import EngineChoice, EngineOption
from ragflash.cli.options import JsonOption, ModelOption
from ragflash.cli.output import Output
from ragflash.cli.parts import SCOPE, library_and_engine
from ragflash.errors import SettingInvalid
from ragflash.rag.records import DEFAULT_COLLECTION, QuoteMode
from ragflash.samples import LANGUAGES, QUESTIONS_NAME, sample_path
from ragflash.settings import load_settings

FolderArgument = Annotated[
    Path | None,
    typer.Argument(help="Documents and a questions.jsonl; the built-in ones if left out."),
]
QuotingOption = Annotated[QuoteMode, typer.Option(help="How the model's quotes are made.")]
LanguagesOption = Annotated[
    bool, typer.Option("--languages", help="Take the built-in set in other languages.")
]


def evaluate(
    folder: FolderArgument = None,
    *,
    languages: LanguagesOption = False,
    engine: EngineOption = EngineChoice.AUTO,
    quoting: QuotingOption = QuoteMode.CONSTRAINED,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only the first questions.")] = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score answers to questions whose pages are known.

    docs/evaluation.md defines the figures.
    """
    from ragflash.rag import evaluate as evaluation  # noqa: PLC0415  (loads the store)
    from ragflash.rag.answer import Answerer  # noqa: PLC0415  (same)

    use_engine = engine is EngineChoice.AUTO
    with (
        Output(as_json=as_json) as output,
        tempfile.TemporaryDirectory(prefix="ragflash-eval-") as data_dir,
    ):
        folder = _choose_folder(folder, languages=languages)
        settings = load_settings(data_dir=Path(data_dir), model=model)
        questions = evaluation.read_questions(folder)[:limit]
        with (
            library_and_engine(settings, with_engine=use_engine) as (library, client),
            output.progress() as track,
        ):
            track("reading documents in", 0, 0)
            records = evaluation.ingest(library, SCOPE, DEFAULT_COLLECTION, folder, questions)
            results = asyncio.run(
                evaluation.ask_all(
                    Answerer(library, client),
                    library,
                    SCOPE,
                    questions,
                    records,
                    use_engine=use_engine,
                    quoting=quoting,
                    progress=lambda done, total: track("asking questions", done, total),
                )
            )
            info = EngineOut.of(client.info()).model_dump() if client else None
        metrics = evaluation.metrics(results)
        by_language = evaluation.metrics_by_language(results)
        output.show(_table({"all" if by_language else "value": metrics, **by_language}))
        output.result(
            {
                **provenance(),
                "folder": folder.name,
                "questions": len(questions),
                "engine": info,
                **({"quoting": quoting} if use_engine else {"metrics_engine_none": metrics}),
                "metrics": metrics,
                **({"languages": by_language} if by_language else {}),
                "rows": evaluation.report_rows(results),
            }
        )


def _choose_folder(folder: Path | None, *, languages: bool) -> Path:
    if folder is not None and languages:
        raise SettingInvalid("--languages names a folder of its own: leave FOLDER out")
    name = f"{LANGUAGES}/{QUESTIONS_NAME}" if languages else QUESTIONS_NAME
    return folder or sample_path(name).parent


def _table(columns: dict[str, dict[str, float]]) -> Table:
    table = Table("figure", *columns, box=None)
    for name in next(iter(columns.values())):
        table.add_row(name, *(f"{values[name]:.4f}" for values in columns.values()))
    return table
