from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ragflash.engine.constrain import ConstraintCompiler
from ragflash.engine.constraint import Free, Literal, QuoteFrom
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import (
    FinishReason,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.errors import InputError
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    RawTemplate,
    ToyModel,
    TurnTemplate,
    byte_tokenizer,
    document,
    question,
    random_logits,
    user,
)

TOKENIZER = byte_tokenizer(" the", " cat", "the", "cat", " sat", "sat", ".\n", ". ", "é ", " x")
BYTES = tuple(map(TOKENIZER.token_bytes, range(TOKENIZER.vocab_size)))
COMPILER = ConstraintCompiler(TOKENIZER, BYTES)
SOURCE = "the cat sat. the cat ran. a dog sat.\n\nthe end."
SENTENCES = ((0, 12), (13, 25), (26, 36), (38, 46))


def quoting(text=SOURCE, source_id="d", **options):
    constraint = QuoteFrom((source_id,), **options)
    return start(constraint, document(text, "d", head="Doc: "))


def start(constraint, *segments):
    prompt = compile_prompt(user(*segments, question("?")), RawTemplate(), TOKENIZER)
    return COMPILER.compile(constraint, prompt)


def ranges(*pairs):
    return tuple(("d", a, b) for a, b in pairs)


def spelled(mask):
    return {BYTES[token] for token in mask.ids.tolist()} if mask.is_allow else None


def walk(cursor, text):
    for token in TOKENIZER.encode(text):
        assert cursor.mask().permits(token), text
        cursor.advance((token,))
    return cursor


def test_a_quote_starts_where_a_range_starts():
    cursor = quoting(ranges=ranges(*SENTENCES))
    assert spelled(cursor.mask()) == {b"t", b"the", b"a"}
    inside = quoting("a cat sat", ranges=ranges((2, 5), (6, 9)), min_words=1)
    assert spelled(inside.mask()) == {b"c", b"cat", b"s", b"sat"}


def test_white_space_at_the_edges_of_a_range_is_left_out():
    cursor = quoting("a cat sat \n", ranges=ranges((1, 12)), min_words=1)
    walk(cursor, "cat sat")
    assert cursor.is_done
    assert cursor.quotes()[0].quote.source_start == 2


def test_a_quote_ends_where_a_range_ends():
    cursor = walk(quoting(ranges=ranges(*SENTENCES), min_words=1), "the cat sat")
    assert not cursor.can_end
    assert spelled(cursor.mask()) == {b".", b". "}
    cursor.advance(TOKENIZER.encode("."))
    assert cursor.can_end
    (quoted,) = cursor.quotes()
    assert (quoted.quote.source_start, quoted.quote.source_end) == (0, 12)


def test_a_quote_may_run_on_to_the_end_of_a_later_range():
    cursor = walk(quoting(ranges=ranges(*SENTENCES), min_words=4), "the cat ran")
    assert spelled(cursor.mask()) == {b". "}, "too few words to end here"
    walk(cursor, ". a dog sat.")
    assert cursor.can_end
    assert (cursor.quotes()[0].quote.source_start, cursor.quotes()[0].quote.source_end) == (13, 36)


def test_a_single_continuation_is_forced():
    cursor = walk(quoting(ranges=ranges(*SENTENCES), min_words=1), "a")
    assert b"".join(BYTES[token] for token in cursor.forced(100)) == b" dog sat"
    assert cursor.num_tokens == 1
    assert cursor.forced(2) == cursor.forced(100)[:2]


def test_a_range_too_long_for_the_limit_is_cut_behind_a_word():
    cursor = quoting("the cat sat sat sat", max_characters=12, min_words=1, ranges=ranges((0, 19)))
    walk(cursor, "the cat")
    assert not cursor.can_end
    walk(cursor, " sat")
    assert cursor.is_done


def test_the_limit_is_kept_at_the_last_permitted_end_in_reach():
    cursor = quoting(
        "the cat sat sat sat",
        min_words=1,
        max_characters=15,
        ranges=ranges((0, 7), (0, 11), (0, 19)),
    )
    walk(cursor, "the cat sat")
    assert cursor.is_done


def test_an_unfinished_quote_is_cut_back_to_a_permitted_end():
    text = "one two three four five 😀 six seven"
    cursor = walk(quoting(text, min_words=2), "one two three")
    cursor.advance(TOKENIZER.encode(" f"))
    assert not cursor.can_end
    assert cursor.quotes()[0].quote.source_end == len("one two three")
    cursor = quoting(text, min_words=2)
    cursor.advance(TOKENIZER.encode("one tw"))
    assert cursor.quotes() == ()


def test_only_the_named_sources_are_quoted():
    constraint = QuoteFrom(("b",), min_words=1)
    cursor = start(constraint, document("the cat", "a"), document("sat", "b"))
    assert spelled(cursor.mask()) == {b"sat"}


def test_a_quote_does_not_jump_over_what_was_left_out():
    text = "the cat sat"
    spans = (Span("d", 0, 0, 3), Span("d", 40, 3, 8))
    segment = TextSegment(SegmentKind.DOCUMENT, text, spans)
    cursor = walk(start(QuoteFrom(("d",), min_words=1), segment), "the")
    assert cursor.is_done


@pytest.mark.parametrize(
    "options",
    [
        {"source_id": "absent"},
        {"ranges": (("other", 0, 3),)},
        {"min_words": 0},
        {"min_words": 5, "max_characters": 4},
    ],
)
def test_what_cannot_be_quoted_is_refused(options):
    with pytest.raises(InputError):
        quoting(**options)


def test_closing_marker_ends_a_quote_even_where_the_source_goes_on_with_it():
    cursor = start((QuoteFrom(("d",), min_words=1), Literal('"')), document('a" b', "d"))
    walk(cursor, 'a"')
    assert cursor.is_done
    assert cursor.quotes()[0].quote.source_end == 1


def test_free_text_after_a_quote_begins_where_the_source_is_left():
    cursor = start((QuoteFrom(("d",), min_words=1), Free(until="#")), document("ab cd", "d"))
    walk(cursor, "abX")
    assert cursor.quotes()[0].quote.source_end == 2


@st.composite
def documents(draw):
    words = ["the", "cat", "sat", "a", "x", "é", "😀", ".", ".\n", "\n\n", "  "]
    text = " ".join(draw(st.lists(st.sampled_from(words), min_size=4, max_size=40)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), min_size=2, max_size=12)))
    pairs = [(a, b) for a, b in pairwise(cuts) if text[a:b].strip()]
    assume(pairs)
    return text, pairs


@settings(max_examples=60)
@given(documents(), st.integers(1, 40), st.integers(0, 2**32))
def test_every_quote_of_ranges_is_made_of_them(case, most, seed):
    text, pairs = case
    rng = np.random.default_rng(seed)
    try:
        cursor = quoting(text, min_words=1, max_characters=most, ranges=ranges(*pairs))
    except InputError:
        return
    output = []
    while not cursor.is_done:
        choices = [token for token in cursor.mask().ids.tolist() if token not in TOKENIZER.stop_ids]
        if not choices or (cursor.can_end and rng.random() < 0.3):
            break
        output.append(int(rng.choice(choices)))
        cursor.advance(output[-1:])
    ((at, quote),) = ((quoted.start, quoted.quote) for quoted in cursor.quotes())
    copied = text[quote.source_start : quote.source_end]
    assert (at, b"".join(BYTES[token] for token in output).decode()) == (0, copied)
    assert copied == copied.strip()
    assert len(copied) <= most
    starts = {len(text) - len(text[a:].lstrip()) for a, _ in pairs}
    assert quote.source_start in starts
    is_whole = quote.source_end in {len(text[:b].rstrip()) for _, b in pairs}
    assert is_whole or not text[quote.source_end : quote.source_end + 1].isalnum()


def test_quotes_in_an_answer_carry_their_place_in_output_and_source():
    model = ToyModel(random_logits(TOKENIZER.vocab_size), vocab_size=TOKENIZER.vocab_size)
    sentence = QuoteFrom(("d",), min_words=1, ranges=ranges(*SENTENCES))
    constraint = (Literal('é "'), sentence, Literal('" and "'), sentence, Literal('"\n'))
    with toy_engine(model, TOKENIZER, template=TurnTemplate()) as engine:
        for seed in range(5):
            messages = user(document(SOURCE, "d", head="Doc:\n"), question(f"quote {seed}"))
            request = GenerateRequest("q", messages, constraint=constraint)
            finished = engine.complete(request)
            assert finished.reason is FinishReason.CONSTRAINT
            assert len(finished.quotes) == 2
            for quote in finished.quotes:
                assert quote.source_id == "d"
                copied = SOURCE[quote.source_start : quote.source_end]
                assert finished.text[quote.start : quote.end] == copied
                assert quote.source_start in {a for a, _ in SENTENCES}
                assert quote.source_end in {b for _, b in SENTENCES}
        engine.assert_pages_are_accounted_for()
