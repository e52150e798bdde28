"""The `ask` command, and how an answer is shown."""

import asyncio
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragflash.api.schemas import AnswerOut
from ragflash.cli.documents import read_in
from ragflash.cli.options import (
    CtxOption,
    DataDirOption,
    DeviceOption,
    JsonOption,
    KvOption,
    ModelOption,
    SlotsOption,
    VerifyRowsOption,
    VramOption,
)
from ragflash.cli.output import Output, Tracker
from ragflash.cli.parts import SCOPE, find_document, library_and_engine
from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.request import MAX_DRAFT, DraftMode, Timings
from ragflash.rag.records import Answer, AskMode, AskRequest, AskStatus, Citation
from ragflash.settings import load_settings

if TYPE_CHECKING:
    from ragflash.rag.answer import Answerer


_SOURCES = {CacheTier.NONE: "the cache", CacheTier.DEVICE: "the cache", CacheTier.FILE: "a file"}
_ORDINARY_MISSES = frozenset({None, CacheMiss.NONE_STORED, CacheMiss.PREFIX_DIFFERS})


class EngineChoice(StrEnum):
    """Whether the model is used."""

    AUTO = "auto"
    NONE = "none"


EngineOption = Annotated[
    EngineChoice,
    typer.Option(help="`none` answers with the best retrieved sentence and loads no model."),
]
DocumentsOption = Annotated[
    list[str] | None, typer.Option(help="Id or name of a document to ask; repeatable.")
]
FilesOption = Annotated[
    list[Path] | None, typer.Option(help="File to read in first and ask; repeatable.")
]
DraftOption = Annotated[
    DraftMode, typer.Option(help="Who may propose tokens; changes speed alone.")
]
DraftTokensOption = Annotated[
    int | None, typer.Option(min=1, max=MAX_DRAFT, help="Most proposed tokens in a step.")
]


def ask(
    question: Annotated[str, typer.Argument(show_default=False)],
    *,
    document: DocumentsOption = None,
    file: FilesOption = None,
    mode: Annotated[AskMode, typer.Option(help="What the model reads.")] = AskMode.AUTO,
    max_quotes: Annotated[int, typer.Option(min=1, max=20, help="Most quotes shown.")] = 3,
    engine: EngineOption = EngineChoice.AUTO,
    draft: DraftOption = DraftMode.AUTO,
    draft_tokens: DraftTokensOption = None,
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    vram_gb: VramOption = None,
    context_tokens: CtxOption = None,
    kv_format: KvOption = None,
    max_slots: SlotsOption = None,
    verify_rows: VerifyRowsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a question about documents.

    Without --document or --file, everything that is stored is asked.
    """
    with Output(as_json=as_json) as output:
        settings = load_settings(
            data_dir=data_dir,
            model=model,
            device=device,
            vram_gb=vram_gb,
            context_tokens=context_tokens,
            kv_format=kv_format,
            max_slots=max_slots,
            verify_rows=verify_rows,
        )
        use_engine = engine is EngineChoice.AUTO
        with (
            library_and_engine(settings, with_engine=use_engine) as (library, client),
            output.progress() as track,
        ):
            from ragflash.rag.answer import Answerer  # noqa: PLC0415  (loads the store)

            chosen = [find_document(library, name) for name in document or ()]
            chosen += [read_in(library, path, track) for path in file or ()]
            request = AskRequest(
                question=question,
                document_ids=tuple(record.id for record in chosen) or None,
                mode=mode,
                max_quotes=max_quotes,
                use_engine=use_engine,
                draft=draft,
                draft_tokens=draft_tokens,
            )
            answer = asyncio.run(follow(Answerer(library, client), request, track))
        output.say(describe(answer))
        output.result(AnswerOut.of(answer))


async def follow(answerer: "Answerer", request: AskRequest, track: Tracker) -> Answer:
    """Ask, show the stages, and give the answer."""
    async with aclosing(answerer.ask(SCOPE, request)) as events:
        async for event in events:
            if isinstance(event, AskStatus):
                track(event.stage, event.done, event.total)
            elif isinstance(event, Answer):
                return event
    raise AssertionError("an ask ends with its answer or an error")


def describe(answer: Answer) -> str:
    """Spell an answer for people: text, quotes with their places, what it took."""
    quotes = [_describe_citation(citation) for citation in answer.citations]
    return "\n\n".join([answer.answer, *quotes, _describe_work(answer)])


def _describe_citation(citation: Citation) -> str:
    last = "" if citation.page_end == citation.page_start else f"–{citation.page_end}"
    place = [citation.document_name, f"page {citation.page_start}{last}"]
    if citation.section:
        place.append(citation.section)
    place.append(f"characters {citation.start}–{citation.end} ({citation.match})")
    quote = " ".join(citation.quote.split())
    return f"  [{citation.n}] “{quote}”\n      {', '.join(place)}"


def _describe_work(answer: Answer) -> str:
    timings, usage = answer.timings, answer.usage
    parts = [f"mode {answer.mode} ({answer.mode_reason})"]
    if timings.engine is not None:
        cached = f"{usage.cached_tokens} from {_SOURCES[answer.cache_tier]}"
        parts.append(f"{usage.prompt_tokens} prompt tokens, {cached}")
        if timings.engine.restore_ms:
            parts.append(f"restored in {timings.engine.restore_ms / 1000:.2f} s")
        if answer.miss_reason not in _ORDINARY_MISSES:
            parts.append(f"not reused: {answer.miss_reason} {answer.miss_field or ''}".rstrip())
        parts += _describe_drafts(timings.engine)
    if timings.ttft_ms is not None:
        parts.append(f"first token {timings.ttft_ms / 1000:.2f} s")
    parts.append(f"total {timings.total_ms / 1000:.2f} s")
    return "  " + " · ".join(parts)


def _describe_drafts(timings: Timings) -> list[str]:
    if timings.draft_n:
        taken = ", ".join(f"{count.source} {count.accepted}" for count in timings.drafts)
        return [f"{timings.draft_n_accepted} of {timings.draft_n} drafts taken ({taken})"]
    idle = ", ".join(f"{reason} {steps}" for reason, steps in timings.idle_steps)
    return [f"no drafts ({idle})"] if idle else []
