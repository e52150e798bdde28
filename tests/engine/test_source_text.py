"""The document text of a prompt is found again, whatever tokens spell it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.engine.constrain.source_text import SENTINEL, SourceTokens, build_source_text
from ragflash.engine.constrain.spelling import NONE, Spellings
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import SegmentKind, Span, TextSegment
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from tests.engine.toys import RawTemplate, byte_tokenizer, document, question, user

TOKENIZER = byte_tokenizer(" the", "the ", "é", "x y", "\n", "😀 ", ": a", "b\n", "中")
SPELLINGS = Spellings(tuple(map(TOKENIZER.token_bytes, range(TOKENIZER.vocab_size))))
PARTS = st.text(st.sampled_from("ab xy\né中😀: the"), max_size=12)


def layout(*segments, tokenizer=TOKENIZER, spellings=SPELLINGS, sources=("d",)):
    prompt = compile_prompt(user(*segments, question("?")), RawTemplate(), tokenizer)
    return build_source_text(SourceTokens.of(sources, prompt), spellings)


def shown(source_text):
    """Pairs of a place in the source and the text there, of each run."""
    return [(run.start_char, source_text.text[run.first : run.end]) for run in source_text.runs]


@settings(max_examples=150)
@given(st.lists(st.tuples(PARTS, PARTS), min_size=1, max_size=4))
def test_spans_are_found_up_to_tokens_that_hold_other_text(parts):
    text, spans, source = "", [], ""
    for ours, theirs in parts:
        text += ours
        if theirs:
            spans.append(Span("d", len(source), len(text), len(theirs)))
        text += theirs
        source += theirs + "###"
    segment = TextSegment(SegmentKind.DOCUMENT, text, tuple(spans))
    found = layout(segment)
    if found is None:
        return
    assert found.data[found.places[found.stops]].tolist() == [SENTINEL] * len(found.stops)
    for start, run in shown(found):
        assert run
        assert source[start : start + len(run)] == run
    stored = bytes(value if value < 256 else 10 for value in found.data.tolist())
    assert stored.decode() == found.text
    ends = found.places[[run.end for run in found.runs]]
    for place in np.flatnonzero(found.own != NONE).tolist():
        spelled = TOKENIZER.token_bytes(int(found.own[place]))
        end = int(ends[np.searchsorted(ends, place)])  # the last one may hold white space of ours
        assert stored[place:end][: len(spelled)] == spelled[: end - place]


def test_there_may_be_none():
    assert layout(document("one", "a")) is None
    assert layout(document("", "d")) is None


def test_all_of_a_document_is_one_run():
    text = "the é x y\n中😀 the end"
    assert shown(layout(document(text, "d", head="Doc: "))) == [(0, text)]


def test_only_the_named_sources_are_in_it():
    segments = document("one", "a"), document("two", "b"), document("three", "a")
    assert shown(layout(*segments, sources=("b",))) == [(0, "two")]
    assert [text for _, text in shown(layout(*segments, sources=("a",)))] == ["one", "three"]


def test_the_same_text_in_the_same_place_has_the_same_key():
    def key(head, text="the end"):
        segments = document(text, "d", head=head), question("?")
        prompt = compile_prompt(user(*segments), RawTemplate(), TOKENIZER)
        return SourceTokens.of(("d",), prompt).content

    assert key("Doc: ") == key("Cod: ")
    assert key("Doc: ") != key("Doc: ", "the And")


@pytest.mark.parametrize("lost", ["\x04", "\U00045678"])
def test_a_character_that_a_vocabulary_cannot_spell_parts_the_text(packaged_model_path, lost):
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(packaged_model_path))
    spellings = Spellings(tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size))))
    text = f"one two{lost} three é four{lost}{lost}five"
    found = shown(
        layout(document(text, "d", head="Doc:\n"), tokenizer=tokenizer, spellings=spellings)
    )
    assert all(text[start : start + len(run)] == run for start, run in found)
    assert not any(lost in run for _, run in found)
    words = {word for _, run in found for word in run.split()}
    assert {"three", "é", "five"} <= words, "a token in front of what is lost goes with it"
