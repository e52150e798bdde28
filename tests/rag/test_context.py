"""Prompts: everything of a document is traced, and what changes stands behind it."""

from hypothesis import given
from hypothesis import strategies as st

from ragflash.engine.request import ChatMessage, SegmentKind, TextSegment
from ragflash.rag.context import ContextPart, build_messages
from ragflash_ingest.document import Document, DocumentPage
from ragflash_prompts import load
from tests.rag.ready_documents import ready_document


def part(text: str, name: str = "a.txt", ranges=None, *, id_: str = "doc_a") -> ContextPart:
    pages, start = [], 0
    for number, piece in enumerate(text.split("\n"), 1):
        pages.append(DocumentPage(number, None, start, start + len(piece)))
        start += len(piece) + 1
    document = Document(text, tuple(pages), (), "text/plain", "utf-8", (), "test")
    record = ready_document(id_, name=name, pages=len(pages), characters=len(text))
    return ContextPart(record, document, ranges)


def segments(messages: tuple[ChatMessage, ...]) -> list[TextSegment]:
    return [segment for message in messages for segment in message.segments]


@st.composite
def parts(draw) -> list[ContextPart]:
    found = []
    for index in range(draw(st.integers(0, 3))):
        text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
        cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
        pairs = tuple(zip(cuts[::2], cuts[1::2], strict=False))
        ranges = draw(st.sampled_from([None, pairs]))
        found.append(part(text, f"{index}.txt", ranges, id_=f"doc_{index}"))
    return found


@given(parts(), st.text(max_size=30))
def test_spans_point_at_equal_text_and_miss_nothing(given_parts, question):
    sources = {part.record.source_id: part.document.text for part in given_parts}
    shown = []
    for segment in segments(build_messages(given_parts, question, mark="m")):
        assert list(segment.spans) == sorted(segment.spans, key=lambda span: span.start)
        for span in segment.spans:
            end = span.source_start + span.length
            copied = segment.text[span.start : span.start + span.length]
            assert copied == sources[span.source_id][span.source_start : end]
            shown.append((span.source_id, span.source_start, end))
    wanted = [(part.record.source_id, *piece) for part in given_parts for piece in part.shown]
    assert sorted(shown) == sorted(wanted)


@given(parts(), st.text(max_size=30))
def test_the_order_is_rules_documents_passages_question(given_parts, question):
    messages = build_messages(given_parts, question, mark="m")
    assert [message.role for message in messages] == ["system", "user"]
    kinds = [segment.kind for segment in segments(messages)]
    num_whole = sum(part.ranges is None for part in given_parts)
    inside = [SegmentKind.DOCUMENT] * num_whole
    if num_whole < len(given_parts):
        inside.append(SegmentKind.PASSAGES)
    assert kinds == [SegmentKind.RULES, *inside, SegmentKind.QUESTION]


@given(parts())
def test_what_stands_before_the_question_does_not_depend_on_it(given_parts):
    one = segments(build_messages(given_parts, "One?", mark="11111111"))
    two = segments(build_messages(given_parts, "And two?", mark="22222222"))
    assert one[:-1] == two[:-1]
    assert one[-1] != two[-1]


def test_whole_documents_have_a_segment_each_and_passages_share_one():
    given_parts = [part("Whole.", id_="a"), part("Cut.", ranges=((0, 4),), id_="b")]
    given_parts += [part("Cut too.", ranges=((0, 3),), id_="c"), part("Whole too.", id_="d")]
    found = segments(build_messages(given_parts, "Why?", mark="m"))[1:-1]
    sources = [[span.source_id for span in segment.spans] for segment in found]
    assert sources == [["a"], ["d"], ["b", "c"]]


def test_a_passage_says_its_document_and_page():
    text = "First page.\nSecond page."
    found = segments(build_messages([part(text, "b.pdf", ((12, 18),))], "Why?", mark="m"))[1]
    assert load("passage_head").render(name="b.pdf", page="2") in found.text
    assert "First" not in found.text


def test_the_rules_and_the_question_say_nothing_of_the_documents():
    asked = "What is {{mark}}?"
    rules, document, question = segments(build_messages([part("Secret.")], asked, mark="f00d"))
    assert "Secret." in document.text
    assert "f00d" not in document.text
    assert rules.text == load("rules").render().strip()
    assert question.text == load("question").render(mark="f00d", question=asked).rstrip()
    assert "Secret." not in rules.text + question.text


def test_braces_of_a_document_are_text():
    (_, document, _) = segments(build_messages([part("Say {{mark}}.", "{{x}}")], "Q?", mark="m"))
    assert "Say {{mark}}." in document.text
