"""The `demo` command: the whole story on two real documents, in a few minutes on a laptop."""

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragflash.api.document_schemas import DocumentOut
from ragflash.api.schemas import AnswerOut
from ragflash.bench.provenance import provenance
from ragflash.cli import ask, documents
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
from ragflash.cli.output import Output
from ragflash.cli.parts import library_and_engine
from ragflash.rag.records import Answer, AskMode, AskRequest, DocumentRecord
from ragflash.samples import sample_path
from ragflash.settings import load_settings

if TYPE_CHECKING:
    from ragflash.rag.answer import Answerer

# Too long for a small model to read whole: the passages are looked up first.
MANUAL = "debian-policy.pdf"
MANUAL_QUESTIONS = (
    "How long may the one-line summary of a package be?",
    "How can a program signal that a reboot is required?",
    "In what unit is the space that a package takes on disk written down?",
)
# Short enough to be read whole, which needs to be done once.
GUIDE = "bug-reporting.txt"
GUIDE_QUESTIONS = (
    "How can I suppress the acknowledgement mail?",
    "Which command do Emacs users have for reporting a bug?",
)

_NEXT = """\
Now with your own documents:

  ragflash ingest PATH...
  ragflash ask "QUESTION"

or as a server:

  ragflash serve
  curl -F file=@manual.pdf 'http://127.0.0.1:8000/v1/documents?wait=60'
  curl http://127.0.0.1:8000/v1/ask -H 'Content-Type: application/json' \\
       -d '{"question": "How long are records kept?"}'"""


def demo(
    *,
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
    """Read two real documents and answer questions about them.

    Without --data-dir nothing is left behind.
    """
    with Output(as_json=as_json) as output, ExitStack() as stack:
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragflash-")))
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
        from ragflash.rag.answer import Answerer  # noqa: PLC0415  (loads the store)

        library, engine = stack.enter_context(library_and_engine(settings))
        answerer = Answerer(library, engine)
        records = []
        for name in (MANUAL, GUIDE):
            with output.progress() as track:
                records.append(documents.read_in(library, sample_path(name), track))
            output.say(documents.describe(records[-1]))
        manual, guide = records
        output.say("\nThe manual is too long to be read whole: passages are looked up.")
        looked_up = [_ask(output, answerer, text, manual) for text in MANUAL_QUESTIONS]
        output.say("\nThe guide fits: the model reads all of it, once.")
        read = [_ask(output, answerer, text, guide) for text in GUIDE_QUESTIONS]
        comparison = _compare(*read)
        output.say(f"\n{comparison['text']}\n\n{_NEXT}")
        output.result(
            {
                **provenance(),
                "documents": [DocumentOut.of(record).model_dump(mode="json") for record in records],
                "answers": [
                    AnswerOut.of(answer).model_dump(mode="json") for answer in looked_up + read
                ],
                "second_question": comparison,
            }
        )


def _ask(output: Output, answerer: "Answerer", question: str, record: DocumentRecord) -> Answer:
    mode = AskMode.FULL if record.name == GUIDE else AskMode.RETRIEVE
    request = AskRequest(question, (record.id,), mode)
    output.say(f"\n> {question}\n")
    with output.progress() as track:
        answer = asyncio.run(ask.follow(answerer, request, track))
    output.say(ask.describe(answer))
    return answer


def _compare(first: Answer, second: Answer) -> dict[str, Any]:
    """Tell what the second question about one document saved."""
    before_ms, after_ms = first.timings.ttft_ms, second.timings.ttft_ms
    if before_ms is None or after_ms is None:
        text = "The model found nothing to answer from, so there is nothing to compare."
    else:
        text = (
            f"Second question about the guide: {second.usage.cached_tokens} of "
            f"{second.usage.prompt_tokens} prompt tokens were already read, first token after "
            f"{after_ms / 1000:.2f} s instead of {before_ms / 1000:.2f} s."
        )
    return {
        "text": text,
        "cached_tokens": [first.usage.cached_tokens, second.usage.cached_tokens],
        "ttft_ms": [before_ms, after_ms],
    }
