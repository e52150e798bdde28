"""Measures answers over a folder of documents and a `questions.jsonl`, without a judge.

Every figure is a count that a reader can check by hand; their definitions are in
`docs/evaluation.md`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ragflash.errors import InputError, NotFound
from ragflash.rag.answer import Answerer
from ragflash.rag.library import Library
from ragflash.rag.quotes import locate
from ragflash.rag.records import (
    Answer,
    AskRequest,
    Citation,
    DocumentRecord,
    QuoteMode,
    Scope,
)

QUESTIONS_NAME = "questions.jsonl"
_FIELDS = {"document": str, "question": str, "answerable": bool, "pages": list}


@dataclass(frozen=True, slots=True)
class EvalQuestion:
    """One line of `questions.jsonl`.

    Attributes:
        document: File name in the folder.
        pages: Physical pages that hold the answer, from 1.
        quote: The passage that answers, where one does.
        language: Code of the question's and the document's language, where a set has several.
    """

    document: str
    question: str
    answerable: bool
    pages: tuple[int, ...]
    quote: str | None
    language: str | None = None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What became of one question.

    Attributes:
        located: Citations found at their offsets.
        page_hits: Citations that touch an expected page of the expected document.
        overlap: Share of the expected passage that the citations cover.
    """

    question: EvalQuestion
    answer: Answer
    located: int
    page_hits: int
    overlap: float


def read_questions(folder: Path) -> list[EvalQuestion]:
    """Read and check a folder's questions.

    Raises:
        NotFound: No `questions.jsonl`, or a document that it names is missing.
        InputError: A line is not what it should be; names the line.
    """
    path = folder / QUESTIONS_NAME
    if not path.is_file():
        raise NotFound(f"{folder} holds no {QUESTIONS_NAME}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error}") from error
    questions = [_parse(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise InputError(f"{path} holds no question")
    for name in dict.fromkeys(question.document for question in questions):
        if not (folder / name).is_file():
            raise NotFound(f"{QUESTIONS_NAME} names {name}, which is not in {folder}")
    return questions


def ingest(
    library: Library,
    scope: Scope,
    collection_id: str,
    folder: Path,
    questions: Sequence[EvalQuestion],
) -> dict[str, DocumentRecord]:
    """Ingest the documents that the questions name, and only these; blocks until they are ready.

    Raises:
        InputError: A document could not be read.
    """
    records = {}
    for name in dict.fromkeys(question.document for question in questions):
        added = library.add(scope, collection_id, name, folder / name)
        if added.job is not None:
            library.wait(scope, added.job.id)
        record = library.get(scope, added.document.id)
        if not record.state.is_searchable:
            raise InputError(f"{name} could not be ingested: {record.reason}")
        records[name] = record
    return records


async def ask_all(
    answerer: Answerer,
    library: Library,
    scope: Scope,
    questions: Sequence[EvalQuestion],
    records: dict[str, DocumentRecord],
    *,
    use_engine: bool,
    quoting: QuoteMode = QuoteMode.CONSTRAINED,
    progress: Callable[[int, int], None],
) -> list[EvalResult]:
    """Ask every question over all documents together, one after the other."""
    results = []
    document_ids = tuple(record.id for record in records.values())
    for done, question in enumerate(questions):
        progress(done, len(questions))
        request = AskRequest(
            question.question, document_ids, use_engine=use_engine, quoting=quoting
        )
        answer = await answerer.answer(scope, request)
        results.append(_judge(library, scope, question, records[question.document], answer))
    progress(len(questions), len(questions))
    return results


def metrics(results: Sequence[EvalResult]) -> dict[str, float]:
    """Sum results up; a share of nothing is 0."""
    answerable = [result for result in results if result.question.answerable]
    unanswerable = [result for result in results if not result.question.answerable]
    sent = [len(result.answer.citations) for result in results]
    sent_answerable = [len(result.answer.citations) for result in answerable]
    return {
        "quote_located_rate": _share(sum(r.located for r in results), sum(sent)),
        "citation_page_recall": _share(sum(r.page_hits > 0 for r in answerable), len(answerable)),
        "citation_page_precision": _share(
            sum(r.page_hits for r in answerable), sum(sent_answerable)
        ),
        "expected_quote_overlap": _share(sum(r.overlap for r in answerable), len(answerable)),
        "abstention_recall": _share(
            sum(not r.answer.answered for r in unanswerable), len(unanswerable)
        ),
        "false_refusal_rate": _share(
            sum(not r.answer.answered for r in answerable), len(answerable)
        ),
    }


def metrics_by_language(results: Sequence[EvalResult]) -> dict[str, dict[str, float]]:
    """Sum results up language by language; empty for a set whose questions name none."""
    languages = sorted({result.question.language or "" for result in results} - {""})
    return {
        language: metrics([r for r in results if r.question.language == language])
        for language in languages
    }


def report_rows(results: Sequence[EvalResult]) -> list[dict[str, object]]:
    """Give the raw samples from which `metrics` can be computed again."""
    return [
        {
            **{k: v for k, v in asdict(result.question).items() if (k, v) != ("language", None)},
            "answered": result.answer.answered,
            "answer": result.answer.answer,
            "citations": [
                {
                    "document": citation.document_name,
                    "pages": [page.page for page in citation.pages],
                    "start": citation.start,
                    "end": citation.end,
                    "quote": citation.quote,
                    "match": citation.match,
                }
                for citation in result.answer.citations
            ],
            "located": result.located,
            "page_hits": result.page_hits,
            "overlap": round(result.overlap, 4),
            "total_ms": round(result.answer.timings.total_ms, 1),
        }
        for result in results
    ]


def _judge(
    library: Library, scope: Scope, question: EvalQuestion, record: DocumentRecord, answer: Answer
) -> EvalResult:
    located = sum(_is_located(library, scope, citation) for citation in answer.citations)
    own = [citation for citation in answer.citations if citation.document_id == record.id]
    pages = set(question.pages)
    page_hits = sum(bool(pages & {page.page for page in citation.pages}) for citation in own)
    overlap = 0.0
    if question.quote and own:
        found = locate(question.quote, library.document(scope, record.id).text)
        if found is not None:
            overlap = _covered(found[1], found[2], own)
    return EvalResult(question, answer, located, page_hits, overlap)


def _is_located(library: Library, scope: Scope, citation: Citation) -> bool:
    text = library.document(scope, citation.document_id).text
    return text[citation.start : citation.end] == citation.quote


def _covered(start: int, end: int, citations: Sequence[Citation]) -> float:
    wanted = set(range(start, end))
    cited = {at for citation in citations for at in range(citation.start, citation.end)}
    return len(wanted & cited) / len(wanted)


def _share(part: float, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _parse(line: str, number: int) -> EvalQuestion:
    where = f"{QUESTIONS_NAME} line {number}"
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if isinstance(fields, dict) and fields.get("answerable") is False:
        fields["pages"] = fields.get("pages") or []  # nothing to point at
    for name, kind in _FIELDS.items():
        if not isinstance(fields, dict) or not isinstance(fields.get(name), kind):
            raise InputError(f"{where}: {name!r} must be a {kind.__name__}")
    if not all(type(page) is int and page >= 1 for page in fields["pages"]):
        raise InputError(f"{where}: 'pages' must hold page numbers from 1")
    quote, language = fields.get("quote"), fields.get("language")
    for name, value in (("quote", quote), ("language", language)):
        if not isinstance(value, str | None):
            raise InputError(f"{where}: {name!r} must be a str or null")
    return EvalQuestion(
        document=fields["document"],
        question=fields["question"],
        answerable=fields["answerable"],
        pages=tuple(fields["pages"]),
        quote=quote or None,
        language=language or None,
    )
