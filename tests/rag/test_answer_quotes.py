"""What may be cited: the chosen sentences of the documents that were asked, and nothing else."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ragflash.engine.constraint import QuoteFrom, Quoting
from ragflash.errors import (
    NotFound,
)
from ragflash.rag.records import (
    AskSources,
    QuoteMatch,
    QuoteMode,
    Scope,
)
from tests.rag.asking import (
    ENGINES,
    MODES,
    PUMP,
    WARRANTY,
    answered,
    at,
    citations_are_in_the_text,
    run,
)
from tests.rag.engines import ScriptedEngine, permitted, rendered


@pytest.fixture(params=ENGINES)
def any_engine(request):
    return ENGINES[request.param]()


@pytest.mark.parametrize("mode", MODES)
def test_a_citation_is_the_documents_own_text(shelf, any_engine, mode):
    shelf.add(PUMP)
    answer = answered(shelf, any_engine, mode=mode)
    assert answer.citations[0].quote == WARRANTY
    assert answer.citations[0].match is QuoteMatch.EXACT
    assert citations_are_in_the_text(shelf, answer)


def test_the_quote_of_the_model_leads(shelf):
    other = "The warranty of the pump lasts 12 months when it was used at sea."
    shelf.add(f"{PUMP} {other}")
    order = [citation.quote for citation in answered(shelf).citations]
    assert {*order} == {WARRANTY, other}
    engine = ScriptedEngine(quoting=lambda request: [permitted(request).ranges[1]])
    answer = answered(shelf, engine)
    assert [citation.quote for citation in answer.citations] == order[::-1]
    assert answer.answer == f"{order[1]} [1][2]"


def test_a_quote_may_run_on_to_another_chosen_sentence(shelf):
    second = "The warranty of the pump lasts 12 months when it was used at sea."
    id_ = shelf.add(f"{WARRANTY} {second}")
    end = len(WARRANTY) + 1 + len(second)
    answer = answered(shelf, ScriptedEngine(quoting=lambda request: [(id_, 0, end)]))
    assert [citation.quote for citation in answer.citations] == [f"{WARRANTY} {second}"]
    assert answer.dropped_quotes == 0


OUTSIDE = {
    "another sentence": at(PUMP, "Bread is sold every morning in the village."),
    "from before": (0, at(PUMP, WARRANTY)[1]),
    "to behind": (at(PUMP, WARRANTY)[0], len(PUMP)),
    "beyond the text": (at(PUMP, WARRANTY)[0], len(PUMP) + 50),
    "from behind": (-50, -1),
    "nothing": (at(PUMP, WARRANTY)[0],) * 2,
    "backwards": at(PUMP, WARRANTY)[::-1],
    "inside words": (at(PUMP, WARRANTY)[0] + 1, at(PUMP, WARRANTY)[1] - 3),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_quote_outside_the_chosen_evidence_never_leaves(shelf, name):
    id_ = shelf.add(PUMP)
    engine = ScriptedEngine(quoting=lambda request: [(id_, *OUTSIDE[name])])
    answer = answered(shelf, engine)
    assert [citation.quote for citation in answer.citations] == [WARRANTY]
    assert answer.dropped_quotes == 1


def test_a_quote_of_an_unknown_source_never_leaves(shelf):
    shelf.add(PUMP)
    engine = ScriptedEngine(quoting=lambda request: [("doc_unknown", 0, 32)])
    answer = answered(shelf, engine)
    assert [citation.quote for citation in answer.citations] == [WARRANTY]
    assert answer.dropped_quotes == 1


def test_a_quote_of_a_document_that_was_not_asked_never_leaves(shelf):
    asked, other = shelf.add(PUMP), shelf.add(PUMP + " Once more.", "b.txt")
    engine = ScriptedEngine(quoting=lambda request: [(other, *at(PUMP, WARRANTY))])
    answer = answered(shelf, engine, document_ids=(asked,))
    assert [citation.document_id for citation in answer.citations] == [asked]


def test_a_quote_that_was_cut_at_a_word_is_still_a_citation(shelf):
    id_ = shelf.add(PUMP)
    start, end = at(PUMP, "The warranty of the pump lasts 24 months")
    answer = answered(shelf, ScriptedEngine(quoting=lambda request: [(id_, start, end)]))
    assert [citation.quote for citation in answer.citations] == [PUMP[start:end]]


def test_an_engine_that_quotes_nothing_does_not_spoil_the_answer(shelf):
    shelf.add(PUMP)
    answer = answered(shelf, ScriptedEngine(quoting=lambda request: []))
    assert answer.answer == f"{WARRANTY} [1]"


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_no_more_quotes_leave_than_asked_for(shelf, any_engine, limit):
    sentences = [f"The warranty of the pump lasts {n} months in zone {n}." for n in range(4)]
    shelf.add(" ".join(sentences))
    answer = answered(shelf, any_engine, max_quotes=limit)
    assert 1 <= len(answer.citations) <= limit
    assert len(answer.citations) == min(limit, 4)


def test_the_model_may_quote_no_more_sentences_than_asked_for(shelf):
    sentences = [f"The warranty of the pump lasts {n} months in zone {n}." for n in range(4)]
    shelf.add(" ".join(sentences))
    engine = ScriptedEngine()
    answered(shelf, engine, max_quotes=2)
    assert len(permitted(engine.generated[0]).ranges) == 2


def test_parts_of_one_sentence_count_as_quotes_each(shelf):
    id_ = shelf.add(PUMP)
    parts = [at(PUMP, "The warranty of the pump"), at(PUMP, "from the day of delivery.")]
    engine = ScriptedEngine(quoting=lambda request: [(id_, *part) for part in parts])
    quotes = [citation.quote for citation in answered(shelf, engine, max_quotes=2).citations]
    assert quotes == [PUMP[start:end] for start, end in parts]
    assert len(answered(shelf, engine, max_quotes=1).citations) == 1


def test_a_broken_quote_is_not_looked_for_elsewhere(shelf):
    broken = "The warranty of the pump lasts 24 month"
    text = f"{PUMP} {broken} is wrong and nobody at all would ever say such a thing."
    id_ = shelf.add(text)
    engine = ScriptedEngine(quoting=lambda request: [(id_, *at(text, broken))])
    answer = answered(shelf, engine, max_quotes=1)
    assert [citation.quote for citation in answer.citations] == [WARRANTY]
    assert answer.dropped_quotes == 1


def test_quotes_do_not_overlap(shelf, any_engine):
    shelf.add("\n\n".join(f"{PUMP} Copy {number}." for number in range(30)))
    answer = answered(shelf, any_engine, max_quotes=10)
    ranges = sorted((citation.start, citation.end) for citation in answer.citations)
    assert all(one[1] <= two[0] for one, two in pairwise(ranges))
    assert citations_are_in_the_text(shelf, answer)


def test_a_citation_knows_its_page(shelf):
    shelf.add(f"Bread is sold every morning in the village.\f{PUMP}")
    (citation,) = answered(shelf, max_quotes=1).citations
    assert (citation.page_start, citation.page_end) == (2, 2)
    assert citation.pages[0].page == 2


@pytest.fixture
def two(shelf):
    """A shelf and another of the same library; both hold an answer."""
    other = replace(shelf, collection=f"{shelf.collection} of others")
    mine = shelf.add(PUMP.replace("24", "12"), "mine.txt")
    theirs = other.add(PUMP, "theirs.txt")
    return shelf, mine, theirs, Scope(frozenset({shelf.collection, other.collection}))


def test_a_document_of_another_collection_is_not_found(two, any_engine):
    shelf, mine, theirs, _ = two
    with pytest.raises(NotFound) as foreign:
        run(shelf, any_engine, document_ids=(mine, theirs))
    with pytest.raises(NotFound) as absent:
        run(shelf, any_engine, document_ids=(mine, "doc_absent"))
    assert str(foreign.value).replace(theirs, "ID") == str(absent.value).replace("doc_absent", "ID")


def test_nothing_of_another_collection_is_cited_or_read(two, any_engine):
    shelf, mine, *_ = two
    events = run(shelf, any_engine, max_quotes=10)
    assert {citation.document_id for citation in events[-1].citations} == {mine}
    (sources,) = (event for event in events if isinstance(event, AskSources))
    assert sources.document_ids == (mine,)
    assert {hit.chunk.document_id for hit in sources.hits} == {mine}
    if any_engine is not None:
        read = "".join(map(rendered, any_engine.generated))
        read += "".join(request.text for request in any_engine.scored)
        assert "24 months" not in read
        assert "theirs.txt" not in read


def test_a_wider_scope_cites_both(two, any_engine):
    shelf, mine, theirs, both = two
    answer = answered(shelf, any_engine, scope=both, max_quotes=10)
    assert {citation.document_id for citation in answer.citations} == {mine, theirs}
    assert citations_are_in_the_text(shelf, answer, both)


def test_an_empty_scope_answers_nothing(two, any_engine):
    shelf, *_ = two
    answer = answered(shelf, any_engine, scope=Scope(frozenset()))
    assert not answer.answered


def test_only_the_documents_asked_are_cited(shelf, any_engine):
    asked = shelf.add(PUMP.replace("24", "12"), "a.txt")
    shelf.add(PUMP, "b.txt")
    answer = answered(shelf, any_engine, document_ids=(asked,), max_quotes=10)
    assert {citation.document_id for citation in answer.citations} == {asked}


@pytest.mark.parametrize("by", ["request", "engine"])
@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        (WARRANTY, True),
        ("The  warranty of the pump lasts 24 months", True),
        ("The warranty of the pump lasts 99 months from the day of delivery.", False),
        ("The warranty", False),
    ],
)
def test_a_free_quote_is_cited_if_it_is_found_and_says_enough(shelf, by, text, is_found):
    shelf.add(PUMP)
    engine = ScriptedEngine(free_text=text, written="It lasts 24 months.")
    if by == "engine":
        engine = replace(engine, constraints=())
    mode = QuoteMode.FREE if by == "request" else QuoteMode.CONSTRAINED
    answer = answered(shelf, engine, quoting=mode)
    assert (answer.quoting, answer.degraded) == (
        QuoteMode.FREE,
        () if by == "request" else ("quote_from",),
    )
    assert answer.dropped_quotes == (not is_found)
    assert not any(permits_quotes(part) for part in engine.generated[0].constraint)
    assert answer.citations[0].quote in {WARRANTY, "The warranty of the pump lasts 24 months"}
    assert citations_are_in_the_text(shelf, answer)


def permits_quotes(part):
    return isinstance(part, QuoteFrom | Quoting)


def test_the_answer_says_that_quotes_were_constrained(shelf):
    shelf.add(PUMP)
    assert answered(shelf, ScriptedEngine()).quoting is QuoteMode.CONSTRAINED
    assert answered(shelf, ScriptedEngine()).degraded == ()
    assert answered(shelf).quoting is None


def test_other_quotes_of_the_model_are_cited_behind_the_chosen_sentences(shelf):
    id_ = shelf.add(PUMP)
    other = "Bread is sold every morning in the village."
    engine = ScriptedEngine(
        quoting=lambda request: [(id_, *at(PUMP, WARRANTY)), (id_, *at(PUMP, other))]
    )
    answer = answered(shelf, engine)
    assert [citation.quote for citation in answer.citations] == [WARRANTY, other]
    assert answer.dropped_quotes == 0
    alone = answered(shelf, engine, max_quotes=1)
    assert [citation.quote for citation in alone.citations] == [WARRANTY]
