"""Sentences as evidence: which are candidates, which are kept, and when there is none."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.errors import NotFound
from ragflash.rag.answer_type import AnswerType
from ragflash.rag.evidence import (
    MAX_SENTENCE_CHARACTERS,
    WINDOW_CHARACTERS,
    Evidence,
    gather,
    select,
    with_gain,
)
from ragflash.rag.quotes import is_quotable, locate
from ragflash.rag.records import ChunkRecord, Scope, SearchHit
from ragflash.rag.sparse import query_weights
from ragflash_ingest.document import Document, DocumentPage
from tests.rag.conftest import HashEmbedder
from tests.rag.ready_documents import ready_document

SCOPE = Scope(frozenset({"mine"}))


class Shelf:
    """Parsed documents by id, and an embedder whose unrelated words are nearly orthogonal."""

    def __init__(self, **texts: str | Document) -> None:
        self.documents = {
            id_: whole(text) if isinstance(text, str) else text for id_, text in texts.items()
        }
        self._embedder = HashEmbedder(dim=512)
        self.trusted = 1.0

    def get(self, scope, document_id):
        if document_id not in self.documents or "mine" not in scope:
            raise NotFound(f"there is no document {document_id!r}")
        return ready_document(document_id)

    def document(self, scope, document_id):
        self.get(scope, document_id)
        return self.documents[document_id]

    def embed_texts(self, texts):
        return self._embedder.encode_documents(texts)

    def embed_tokens(self, texts):
        return self._embedder.encode_tokens(texts)

    def trust(self, text):
        return self.trusted

    def term_weights(self, text):
        return query_weights(text)

    def hit(self, id_: str, start: int = 0, end: int | None = None, *, score: float = 1.0):
        text = self.documents[id_].text
        end = len(text) if end is None else end
        chunk = ChunkRecord(id_, 0, start, end, text[start:end], 1, 1, None)
        return SearchHit(chunk, f"{id_}.txt", score, 0.5, 0.5)

    def gather(self, question: str, *hits: SearchHit) -> list[Evidence]:
        chosen = hits or [self.hit(id_) for id_ in self.documents]
        return gather(self, SCOPE, question, chosen)


def whole(text: str, furniture: tuple[tuple[int, int], ...] = ()) -> Document:
    page = DocumentPage(1, None, 0, len(text))
    return Document(text, (page,), (), "text/plain", None, (), "test", furniture=furniture)


def weighed(
    score: float,
    *,
    worst: float = 1.0,
    kind: AnswerType = AnswerType.ANY,
    is_kind: bool = True,
    has_names: bool = True,
    held: float = 1.0,
    at: int = 0,
) -> Evidence:
    document = whole("x" * 100)
    place = (None, document, at, at + 1, at, at + 1, 0, 100)
    return Evidence(*place, score, worst, kind, is_kind, has_names, held)


def test_the_sentence_with_the_words_of_the_question_is_first():
    shelf = Shelf(
        a="Bread is sold every morning at eight. The warranty of the pump lasts two years. "
        "Nobody has ever seen the sea from here."
    )
    best = shelf.gather("How long does the warranty of the pump last?")[0]
    assert best.text == "The warranty of the pump lasts two years."
    assert best.document is shelf.documents["a"]
    assert best.record.id == "a"


def test_every_sentence_is_weighed_once_under_its_best_hit():
    text = "The pump is made of good steel. The warranty of the pump lasts two years."
    shelf = Shelf(a=text)
    second = text.index("The warranty")
    found = shelf.gather("warranty", shelf.hit("a", second, score=2.0), shelf.hit("a", score=1.0))
    starts = sorted((item.start, item.passage_start) for item in found)
    assert starts == [(0, 0), (second, second)]


def test_candidates_of_several_documents_compete():
    shelf = Shelf(
        a="The pump is made of good steel.", b="The warranty of the pump lasts two years."
    )
    found = shelf.gather("How long does the warranty last?")
    assert [item.record.id for item in found] == ["b", "a"]


def test_no_hits_are_no_evidence():
    assert gather(Shelf(), SCOPE, "Why?", []) == []


def test_a_hit_outside_the_scope_is_not_read():
    shelf = Shelf(a="The warranty of the pump lasts two years.")
    with pytest.raises(NotFound):
        gather(shelf, Scope(frozenset()), "warranty", [shelf.hit("a")])


def test_furniture_is_never_evidence():
    head = "The warranty handbook of the good pump"
    text = f"{head}\n\nThe warranty of the pump lasts two years."
    bare, marked = Shelf(a=text), Shelf(a=whole(text, ((0, len(head)),)))
    assert head in [item.text for item in bare.gather("warranty of the pump")]
    assert [item.text for item in marked.gather("warranty of the pump")] == [
        "The warranty of the pump lasts two years."
    ]


def test_furniture_that_a_passage_begins_inside_of_is_left_out():
    head = "The warranty handbook of the good pump"
    text = f"{head}\nThe warranty of the pump lasts two years."
    shelf = Shelf(a=whole(text, ((0, len(head)),)))
    found = shelf.gather("warranty", shelf.hit("a", 4))
    assert [item.start for item in found] == [len(head) + 1]


def test_a_sentence_over_the_limit_is_no_evidence():
    def sentence(length: int) -> str:
        return ("warranty word " * 99)[: length - 1].rstrip() + "."

    short, long = sentence(MAX_SENTENCE_CHARACTERS), sentence(MAX_SENTENCE_CHARACTERS + 20)
    assert len(short) <= MAX_SENTENCE_CHARACTERS < len(long)
    assert [item.text for item in Shelf(a=short).gather("warranty")] == [short]
    assert Shelf(a=long).gather("warranty") == []


def test_a_fragment_is_no_evidence():
    shelf = Shelf(a="A warranty? Yes. The warranty of the pump lasts two years.")
    texts = [item.text for item in shelf.gather("warranty")]
    assert texts == ["The warranty of the pump lasts two years."]


def test_a_window_takes_the_sentence_before_first():
    def of_length(name: str, length: int) -> str:
        return f"{name} " + "word " * ((length - len(name) - 6) // 5) + "end."

    middle = of_length("Middle", 100)
    room = WINDOW_CHARACTERS - len(middle) - 1
    before, after = of_length("Before", room - 10), of_length("After", room - 10)
    shelf = Shelf(a=f"{before} {middle} {after}")
    windows = {item.text: item.window for item in shelf.gather("middle word")}
    assert windows[middle] == f"{before} {middle}"
    assert windows[before] == f"{before} {middle}"
    assert windows[after] == f"{middle} {after}"


def test_a_window_takes_the_sentence_after_when_the_one_before_is_too_long():
    before = "Before " + "word " * 80 + "end."
    middle, after = "The middle one says very little.", "The last one says nothing at all."
    shelf = Shelf(a=f"{before} {middle} {after}")
    windows = {item.text: item.window for item in shelf.gather("middle")}
    assert windows[middle] == f"{middle} {after}"


def test_a_window_stays_inside_its_passage():
    first, second = "The pump is made of good steel.", "The warranty of the pump lasts two years."
    shelf = Shelf(a=f"{first} {second}")
    (item,) = shelf.gather("warranty", shelf.hit("a", len(first) + 1))
    assert item.window == second


def test_the_kind_of_answer_is_weighed():
    shelf = Shelf(a="The pump has a warranty of 2 years. The pump has a warranty of good years.")
    found = shelf.gather("How many years is the warranty of the pump?")
    assert {item.text[-9:]: item.is_kind for item in found} == {
        " 2 years.": True,
        "od years.": False,
    }
    assert found[0].is_kind


def test_a_sentence_without_the_kind_of_answer_weighs_less():
    shelf = Shelf(a="The pump has a warranty of many years.")
    (lacking,) = shelf.gather("pump warranty how many years")
    (fitting,) = shelf.gather("pump warranty many years how")
    assert (lacking.is_kind, fitting.is_kind) == (False, True)
    assert lacking.weight < fitting.weight - 0.01


@pytest.mark.parametrize(
    ("text", "is_kind"),
    [
        ("Aufzeichnungen des Amtes werden vierzehn Tage lang im Keller verwahrt.", True),
        ("記録は十四日間保管される。", True),
        ("سوابق به مدت چهارده روز نگهداری می‌شود.", True),
        ("The records of the office are kept in a cellar.", False),
        ("Records live in cellars.", False),
    ],
)
def test_a_text_in_another_language_is_not_judged_by_english_words(text, is_kind):
    (item,) = Shelf(a=text).gather("How many days are records kept?")
    assert item.is_kind is is_kind


def test_the_worst_word_is_one_that_the_window_lacks():
    shelf = Shelf(a="The pump has a warranty of two years.")
    (met,) = shelf.gather("the pump warranty")
    (unmet,) = shelf.gather("the pump submarine")
    assert met.worst_word == pytest.approx(1.0, abs=1e-5)
    assert unmet.worst_word < 0.25


def test_words_that_ask_are_not_looked_for():
    shelf = Shelf(a="The pump has a warranty.\nIt is a good pump.")
    worst = {item.worst_word for item in shelf.gather("does the pump have which warranty")}
    alone = {item.worst_word for item in shelf.gather("the pump have warranty")}
    assert worst == alone


def test_no_evidence_selects_nothing():
    assert select([], 3) == []


def test_the_best_are_kept_in_order_up_to_the_limit():
    items = [weighed(score, at=at) for at, score in enumerate((1.8, 2.0, 1.9, 1.95))]
    assert [item.score for item in select(items, 3)] == [2.0, 1.95, 1.9]
    assert [item.score for item in select(items, 1)] == [2.0]


def test_what_is_far_from_the_best_is_not_kept():
    items = [weighed(2.0), weighed(1.75), weighed(1.6)]
    assert [item.score for item in select(items, 3)] == [2.0, 1.75]


def test_nothing_is_kept_when_the_best_lacks_the_kind():
    assert select([weighed(2.0, is_kind=False), weighed(1.9)], 3) == []
    assert len(select([weighed(2.0), weighed(1.9, is_kind=False)], 3)) == 2


def test_a_reason_may_stand_in_any_of_the_sentences():
    without, reason = weighed(2.0, kind=AnswerType.REASON, is_kind=False), AnswerType.REASON
    assert select([without, weighed(1.9, kind=reason, is_kind=False)], 3) == []
    assert len(select([without, weighed(1.9, kind=reason)], 3)) == 2


def test_no_answer_where_no_passage_holds_the_names():
    assert select([weighed(2.0, has_names=False), weighed(1.9, has_names=False)], 3) == []
    assert len(select([weighed(2.0, has_names=False), weighed(1.9)], 3)) == 2


def test_names_may_stand_in_the_passage_or_its_heading():
    text = "Firefox keeps its lock for long. The limit of the pump is two litres a day."
    found = Shelf(a=text).gather("What is the limit that Firefox sets for the pump?")
    assert all(item.has_names for item in found)
    found = Shelf(a=text).gather("What is the limit that Chrome sets for the pump?")
    assert not any(item.has_names for item in found)
    found = Shelf(a=text).gather("Wie lange hält die Pumpe?")
    assert all(item.has_names for item in found)
    assert any(item.has_names for item in Shelf(a="番号は۴۳۷۴番であるとする。").gather("番号 4374"))


def test_nothing_is_kept_when_every_window_leaves_a_word_unmet():
    assert select([weighed(2.0, worst=0.05), weighed(1.9, worst=0.1)], 3) == []
    assert len(select([weighed(2.0, worst=0.05), weighed(1.9, worst=0.9)], 3)) == 2


def test_nothing_is_kept_when_no_passage_holds_a_share_of_the_words():
    assert select([weighed(2.0, held=0.1), weighed(1.9, held=0.0)], 3) == []
    assert len(select([weighed(2.0, held=0.1), weighed(1.9, held=0.3)], 3)) == 2


def test_words_alone_are_weighed_where_vectors_are_not_trusted():
    shelf = Shelf(a="保証期間は二年間であります。\n部品はすべて鋼鉄で作られている。")
    shelf.trusted = 0.0
    found = shelf.gather("保証期間")
    assert "保証期間" in found[0].text
    assert [item.weight for item in found] == pytest.approx([0.6, 0.3])
    assert found[0].held == pytest.approx(1.0)
    assert found[0].worst_word == 1.0
    assert all(item.held < 0.15 for item in shelf.gather("東京都の人口"))


def test_what_only_vectors_tell_is_kept_where_they_are_trusted():
    shelf = Shelf(a="The pump has a warranty of two years.")
    (item,) = shelf.gather("Wie lange hält das U-Boot?")
    assert (item.held, item.worst_word, item.is_kind) == (1.0, 1.0, True)


def test_only_the_best_windows_can_meet_a_word():
    items = [weighed(2.0, worst=0.1), weighed(1.9, worst=0.1), weighed(1.8, worst=1.0)]
    assert select(items, 2) == []


def test_what_the_model_read_changes_the_order():
    low, high = weighed(1.9), weighed(2.0)
    read = [with_gain(low, 1.0), with_gain(high, 0.0)]
    assert select(read, 2)[0].weight == 1.9
    assert read[1].score == high.score


WORDS = ["pump", "warranty", "two", "years", "The", "steel", "ventilé", "保証期間", "e.g.", "42"]
ENDS = [". ", ".\n", "\n\n", " ", "? ", "\n- ", "。", ":\n"]
texts = st.lists(
    st.tuples(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9), st.sampled_from(ENDS)),
    min_size=1,
    max_size=8,
).map(lambda pieces: "".join(" ".join(words) + end for words, end in pieces))


@settings(max_examples=60)
@given(st.data())
def test_evidence_lies_in_its_document_and_can_be_quoted(data):
    text = data.draw(texts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
    furniture = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    shelf = Shelf(a=replace(whole(text), furniture=furniture))
    for item in shelf.gather("pump warranty", shelf.hit("a", start, end), shelf.hit("a")):
        assert 0 <= item.passage_start <= item.window_start <= item.start
        assert item.start < item.end <= item.window_end <= item.passage_end <= len(text)
        assert item.end - item.start <= MAX_SENTENCE_CHARACTERS
        assert is_quotable(text, item.start, item.end)
        assert not any(item.start < last and first < item.end for first, last in furniture)
        assert item.text == text[item.start : item.end]


@settings(max_examples=60)
@given(texts)
def test_evidence_of_a_whole_document_is_found_where_it_stands(text):
    for item in Shelf(a=text).gather("pump warranty"):
        found = locate(item.text, text, near=item.start)
        assert found is not None
        assert found[1:] == (item.start, item.end)


@given(
    st.lists(st.tuples(st.floats(-1, 3), st.floats(0, 1), st.booleans()), max_size=8),
    st.integers(1, 5),
)
def test_a_selection_is_a_part_of_the_evidence(given_items, limit):
    items = [
        weighed(score, worst=worst, is_kind=is_kind, at=at)
        for at, (score, worst, is_kind) in enumerate(given_items)
    ]
    kept = select(items, limit)
    assert len(kept) <= limit
    assert all(item in items for item in kept)
    assert kept == sorted(kept, key=lambda item: -item.score)
    if kept:
        assert kept[0].score == max(item.score for item in items)
