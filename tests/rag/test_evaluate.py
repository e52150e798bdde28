"""Questions are checked line by line, and every figure can be counted by hand."""

import asyncio
import json
from dataclasses import replace

import pytest

from ragflash.engine.request import Usage
from ragflash.errors import InputError, NotFound
from ragflash.rag import evaluate
from ragflash.rag.answer import Answerer
from ragflash.rag.evaluate import EvalQuestion, EvalResult, metrics, read_questions, report_rows
from ragflash.rag.records import (
    Answer,
    AskMode,
    AskTimings,
    Citation,
    PageRange,
    QuoteMatch,
)

GOOD = {
    "document": "law.txt",
    "question": "How long are records kept?",
    "answerable": True,
    "pages": [1],
    "quote": "Records are kept for seven years.",
}
PAGES = (
    "Records of the office are kept for seven years.",
    "Visitors of the office are asked to wait outside.",
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "law.txt").write_text("\f".join(PAGES))
    (folder / "other.txt").write_text("\f".join(reversed(PAGES)) + " This is the other document.")
    (folder / "unnamed.txt").write_text("Nobody asks anything about this third document here.")
    return folder


def write(folder, *lines) -> None:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "questions.jsonl").write_text(text, encoding="utf-8")


def test_a_line_is_a_question(folder):
    write(folder, GOOD, "", {**GOOD, "answerable": False, "pages": [], "quote": None}, "  ")
    first, second = read_questions(folder)
    assert first == EvalQuestion("law.txt", GOOD["question"], True, (1,), GOOD["quote"])
    assert (second.answerable, second.pages, second.quote) == (False, (), None)


def test_line_separators_inside_a_string_do_not_end_a_line(folder):
    question = "How long\u2028are\x85records kept?"
    write(folder, json.dumps({**GOOD, "question": question}, ensure_ascii=False))
    assert read_questions(folder)[0].question == question


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ("[]", "document"),
        ('"text"', "document"),
        ({**GOOD, "document": 3}, "document"),
        ({**GOOD, "question": None}, "question"),
        ({**GOOD, "answerable": "yes"}, "answerable"),
        ({**GOOD, "pages": "1"}, "pages"),
        ({**GOOD, "pages": ["one"]}, "pages"),
        ({**GOOD, "pages": [0]}, "pages"),
        ({**GOOD, "pages": [1.5]}, "pages"),
        ({**GOOD, "quote": 7}, "quote"),
        ({**GOOD, "language": 7}, "language"),
        ({key: value for key, value in GOOD.items() if key != "pages"}, "pages"),
    ],
)
def test_a_malformed_line_is_named(folder, line, named):
    write(folder, GOOD, "", line)
    with pytest.raises(InputError, match=f"line 3.*{named}"):
        read_questions(folder)


def test_a_file_in_another_encoding_is_refused(folder):
    (folder / "questions.jsonl").write_bytes('{"document": "gesetz_für.txt"}'.encode("latin-1"))
    with pytest.raises(InputError, match="UTF-8"):
        read_questions(folder)


def test_a_file_without_questions_is_refused(folder):
    write(folder, "", "  ")
    with pytest.raises(InputError, match="no question"):
        read_questions(folder)


def test_a_folder_without_questions_is_not_found(folder):
    with pytest.raises(NotFound, match=r"questions\.jsonl"):
        read_questions(folder)


def test_a_missing_document_is_named(folder):
    write(folder, GOOD, {**GOOD, "document": "gone.txt"})
    with pytest.raises(NotFound, match=r"gone\.txt"):
        read_questions(folder)


def question(document: str = "law.txt", **changes) -> EvalQuestion:
    fields = {**GOOD, "document": document, **changes}
    return EvalQuestion(**{**fields, "pages": tuple(fields["pages"])})


def test_only_the_named_documents_are_ingested(own_shelf, folder):
    library, scope = own_shelf.library, own_shelf.scope
    questions = [question(), question(), question("other.txt")]
    records = evaluate.ingest(library, scope, "mine", folder, questions)
    assert sorted(records) == ["law.txt", "other.txt"]
    assert all(record.state.is_searchable for record in records.values())
    listed = {record.name for record in library.list(scope).items}
    assert listed == {"law.txt", "other.txt"}


def test_ingesting_again_uses_what_is_there(own_shelf, folder):
    given = (own_shelf.library, own_shelf.scope, "mine", folder, [question()])
    assert evaluate.ingest(*given) == evaluate.ingest(*given)


def test_a_document_that_cannot_be_read_ends_the_run(own_shelf, folder):
    (folder / "law.txt").write_text("")
    with pytest.raises(InputError, match=r"law\.txt"):
        evaluate.ingest(own_shelf.library, own_shelf.scope, "mine", folder, [question()])


class Replies:
    """Answers by cutting what it is told to out of the documents."""

    def __init__(self, *cuts: tuple[str, int, int, int]) -> None:
        self.cuts = cuts
        self.asked = []

    async def answer(self, scope, request):
        self.asked.append(request)
        return reply(*(cited(*cut) for cut in self.cuts))


def cited(document_id: str, start: int, end: int, page: int, quote: str | None = None) -> Citation:
    text = "\n".join(PAGES)
    return Citation(
        n=1,
        document_id=document_id,
        document_name="law.txt",
        version_sha256="00",
        quote=text[start:end] if quote is None else quote,
        start=start,
        end=end,
        page_start=page,
        page_end=page,
        page_label=None,
        section=None,
        match=QuoteMatch.EXACT,
        pages=(PageRange(page, None, 0, 1),),
    )


def reply(*citations: Citation) -> Answer:
    return Answer(
        id="a",
        question="?",
        answered=bool(citations),
        answer="!",
        citations=citations,
        mode=AskMode.RETRIEVE,
        mode_reason="asked for",
        context="retrieved",
        usage=Usage(0, 0, 0),
        timings=AskTimings(1.0, 2.0, 3.04, None, None),
        engine=None,
    )


@pytest.fixture
def judged(own_shelf, folder):
    """Ask one question of answers that are given; the documents are `law` and `other`."""
    given = (own_shelf.library, own_shelf.scope)
    both = [question(), question("other.txt")]
    records = evaluate.ingest(*given, "mine", folder, both)

    def judge(asked: EvalQuestion, *cuts) -> EvalResult:
        ids = {"law": records["law.txt"].id, "other": records["other.txt"].id}
        replies = Replies(*((ids[name], *rest) for name, *rest in cuts))
        asking = evaluate.ask_all(
            replies, *given, [asked], records, use_engine=False, progress=lambda done, total: None
        )
        (result,) = asyncio.run(asking)
        assert replies.asked[0].document_ids == tuple(ids.values())
        return result

    return judge


def test_a_citation_on_an_expected_page_is_a_hit(judged):
    size = len(PAGES[0])
    result = judged(question(pages=[1]), ("law", 0, size, 1), ("law", size + 1, size + 9, 2))
    assert (result.located, result.page_hits) == (2, 1)


def test_a_page_counts_only_in_its_own_document(judged):
    result = judged(question(pages=[1]), ("other", 0, 8, 1))
    assert result.page_hits == 0
    assert result.overlap == 0.0


def test_a_quote_that_is_not_at_its_offsets_is_not_located(judged):
    result = judged(question(), ("law", 0, 7, 1), ("law", 1, 8, 1, "Records"))
    assert result.located == 1


def test_the_overlap_is_the_share_of_characters_covered(judged):
    asked = question(quote="are kept for seven years.")
    start = PAGES[0].index("are kept")
    cuts = [("law", 0, start + 8, 1), ("law", start + 4, start + 17, 1)]
    assert judged(asked, *cuts).overlap == pytest.approx(17 / 25)
    assert judged(asked, ("law", 0, len(PAGES[0]), 1)).overlap == 1.0
    assert judged(asked).overlap == 0.0
    assert judged(question(quote=None), ("law", 0, 20, 1)).overlap == 0.0


def test_a_question_about_a_missing_passage_has_no_overlap(judged):
    assert judged(question(quote="are kept for nine years."), ("law", 0, 20, 1)).overlap == 0.0


def test_every_question_is_asked_of_all_documents_in_order(own_shelf, folder):
    given = (own_shelf.library, own_shelf.scope)
    asked = [question(), question("other.txt", question="Who is asked to wait outside?")]
    records = evaluate.ingest(*given, "mine", folder, asked)
    ticks = []
    answerer = Answerer(own_shelf.library, None)
    asking = evaluate.ask_all(
        answerer,
        *given,
        asked,
        records,
        use_engine=True,
        progress=lambda done, total: ticks.append((done, total)),
    )
    results = asyncio.run(asking)
    assert [result.question for result in results] == asked
    assert [result.answer.question for result in results] == [item.question for item in asked]
    assert ticks == [(0, 2), (1, 2), (2, 2)]
    for result in results:
        assert result.located == len(result.answer.citations)


def result(answerable: bool, citations: int, located: int, page_hits: int, overlap: float = 0.0):
    answer = reply(*(cited("d", 0, 7, 1) for _ in range(citations)))
    return EvalResult(question(answerable=answerable), answer, located, page_hits, overlap)


def test_figures_are_what_a_reader_counts():
    results = [
        result(True, 3, 3, 2, 0.5),
        result(True, 2, 1, 0, 0.0),
        result(True, 0, 0, 0),
        result(True, 1, 1, 1, 1.0),
        result(False, 2, 2, 1, 1.0),
        result(False, 0, 0, 0),
        result(False, 0, 0, 0),
    ]
    assert metrics(results) == {
        "quote_located_rate": 0.875,  # 7 of 8
        "citation_page_recall": 0.5,  # 2 of 4
        "citation_page_precision": 0.5,  # 3 of 6
        "expected_quote_overlap": 0.375,  # 1.5 of 4
        "abstention_recall": 0.6667,  # 2 of 3
        "false_refusal_rate": 0.25,  # 1 of 4
    }


@pytest.mark.parametrize(
    "results",
    [[], [result(True, 0, 0, 0)], [result(False, 0, 0, 0)]],
    ids=["none", "answerable", "unanswerable"],
)
def test_a_share_of_nothing_is_0(results):
    found = metrics(results)
    assert found["quote_located_rate"] == 0.0
    assert found["citation_page_precision"] == 0.0
    assert all(0.0 <= value <= 1.0 for value in found.values())


def test_rows_hold_what_the_figures_are_made_of():
    (row,) = report_rows([result(True, 2, 1, 1, 0.33333)])
    assert json.loads(json.dumps(row))["question"] == GOOD["question"]
    assert (row["located"], row["page_hits"], row["overlap"]) == (1, 1, 0.3333)
    assert (row["answered"], row["answerable"], row["total_ms"]) == (True, True, 3.0)
    assert [citation["pages"] for citation in row["citations"]] == [[1], [1]]


@pytest.mark.parametrize("pages", [{}, {"pages": None}])
def test_an_unanswerable_question_needs_no_pages(tmp_path, pages):
    fields = {"document": "a.txt", "question": "Why?", "answerable": False, **pages}
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.txt").write_text("Nothing.")
    (folder / "questions.jsonl").write_text(json.dumps(fields))
    assert read_questions(folder)[0].pages == ()


def test_languages_are_summed_up_apart():
    def in_language(language, *others):
        return replace(result(*others), question=question(language=language))

    results = [in_language("ja", True, 1, 1, 1), in_language("de", True, 0, 0, 0)]
    assert metrics(results)["citation_page_recall"] == 0.5
    by_language = evaluate.metrics_by_language(results)
    assert list(by_language) == ["de", "ja"]
    assert [found["citation_page_recall"] for found in by_language.values()] == [0.0, 1.0]
    assert [row["language"] for row in report_rows(results)] == ["ja", "de"]


def test_a_set_in_one_language_names_none():
    results = [result(True, 1, 1, 1)]
    assert evaluate.metrics_by_language(results) == {}
    assert "language" not in report_rows(results)[0]
