from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.engine.constrain import compile_constraint
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import (
    FinishReason,
    Free,
    GenerateRequest,
    Literal,
    QuoteFrom,
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
SOURCE = "the cat sat. the cat ran. a dog sat.\n\nthe end."
SENTENCES = ((0, 12), (13, 25), (26, 36), (38, 46))


def quoting(text=SOURCE, source_id="d", **options):
    constraint = QuoteFrom((source_id,), **options)
    return start(constraint, document(text, "d", head="Doc: "))


def start(constraint, *segments):
    prompt = compile_prompt(user(*segments, question("?")), RawTemplate(), TOKENIZER)
    return compile_constraint(constraint, prompt, TOKENIZER, BYTES)


def ranges(*pairs):
    return tuple(("d", a, b) for a, b in pairs)


def spelled(mask):
    return {BYTES[token] for token in mask.ids.tolist()} if mask.is_allow else None


def walk(cursor, text):
    for token in TOKENIZER.encode(text):
        assert cursor.mask().permits(token), text
        cursor.advance((token,))
    return cursor


def test_a_quote_starts_where_a_range_starts_with_or_without_its_blank():
    cursor = quoting(ranges=ranges(*SENTENCES), min_tokens=1)
    assert spelled(cursor.mask()) == {b" the", b"the", b"a"}
    leading = quoting("a cat sat", ranges=ranges((2, 5), (6, 9)), min_tokens=1)
    assert spelled(leading.mask()) == {b" cat", b"cat", b" sat", b"sat"}


def test_text_of_another_sentence_in_the_token_of_a_start_is_not_quoted():
    with pytest.raises(InputError):
        quoting("the cat", ranges=ranges((1, 7)), min_tokens=1)


def test_a_quote_ends_where_a_range_ends():
    cursor = walk(quoting(ranges=ranges(*SENTENCES), min_tokens=1), "the cat sat")
    assert not cursor.can_end
    assert spelled(cursor.mask()) == {b". "}
    cursor.advance(TOKENIZER.encode(". "))
    assert cursor.can_end
    (quoted,) = cursor.quotes()
    assert (quoted.quote.source_start, quoted.quote.source_end) == (0, 12)


def test_a_single_continuation_is_forced():
    cursor = walk(quoting(ranges=ranges(*SENTENCES), min_tokens=1), "a")
    assert b"".join(BYTES[token] for token in cursor.forced(100)) == b" dog sat.\n"
    assert cursor.num_tokens == 1
    assert cursor.forced(2) == cursor.forced(100)[:2]


def test_minimum_and_maximum():
    cursor = quoting("the cat sat sat sat", min_tokens=2, max_tokens=3)
    walk(cursor, "the")
    assert not cursor.can_end
    walk(cursor, " cat")
    assert cursor.can_end
    walk(cursor, " sat")
    assert cursor.is_done


def test_a_range_too_long_for_the_limit_is_cut_at_it():
    cursor = quoting("the cat sat sat sat", min_tokens=1, max_tokens=3, ranges=ranges((0, 19)))
    walk(cursor, "the cat")
    assert not cursor.can_end
    walk(cursor, " sat")
    assert cursor.is_done


def test_the_limit_is_kept_at_the_last_permitted_end_in_reach():
    cursor = quoting(
        "the cat sat sat sat", min_tokens=1, max_tokens=4, ranges=ranges((0, 7), (0, 11), (0, 19))
    )
    walk(cursor, "the cat sat")
    assert cursor.is_done


def test_characters_of_several_tokens_are_not_cut():
    cursor = quoting("ab😀cd", min_tokens=1)
    assert not any(first[0] & 0xC0 == 0x80 for first in spelled(cursor.mask()))
    cursor.advance(TOKENIZER.encode("b😀")[:3])
    assert not cursor.can_end
    (quoted,) = cursor.quotes()
    assert (quoted.quote.source_start, quoted.quote.source_end) == (1, 2)


def test_only_the_named_sources_are_quoted():
    constraint = QuoteFrom(("b",), min_tokens=1)
    cursor = start(constraint, document("the cat", "a"), document("sat", "b"))
    assert spelled(cursor.mask()) == {b"sat"}


def test_a_quote_does_not_jump_over_what_was_left_out():
    text = "the cat sat"
    spans = (Span("d", 0, 0, 3), Span("d", 40, 3, 8))
    segment = TextSegment(SegmentKind.DOCUMENT, text, spans)
    cursor = walk(start(QuoteFrom(("d",), min_tokens=1), segment), "the")
    assert cursor.is_done


@pytest.mark.parametrize(
    "options",
    [
        {"source_id": "absent"},
        {"ranges": (("other", 0, 3),)},
        {"min_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
    ],
)
def test_what_cannot_be_quoted_is_refused(options):
    with pytest.raises(InputError):
        quoting(**options)


def test_closing_marker_ends_a_quote_even_where_the_source_goes_on_with_it():
    cursor = start((QuoteFrom(("d",), min_tokens=1), Literal('"')), document('a"b', "d"))
    walk(cursor, 'a"')
    assert cursor.is_done
    assert cursor.quotes()[0].quote.num_tokens == 1


def test_free_text_after_a_quote_begins_where_the_source_is_left():
    cursor = start((QuoteFrom(("d",), min_tokens=1), Free(until="#")), document("abc", "d"))
    walk(cursor, "abX")
    assert cursor.quotes()[0].quote.num_tokens == 2


WORDS = st.sampled_from(["the", "cat", "sat", "a", "x", "é", "😀", ".", ".\n", "\n\n", "  ", "the"])


@st.composite
def documents(draw):
    text = " ".join(draw(st.lists(WORDS, min_size=4, max_size=40)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), min_size=2, max_size=12)))
    pairs = [(a, b) for a, b in pairwise(cuts) if text[a:b] == text[a:b].strip()]
    return text, pairs if draw(st.booleans()) else []


@settings(max_examples=60)
@given(documents(), st.integers(1, 6), st.integers(0, 12), st.integers(0, 2**32))
def test_every_quote_is_in_its_source(case, min_tokens, more, seed):
    text, pairs = case
    rng = np.random.default_rng(seed)
    try:
        cursor = quoting(
            text, min_tokens=min_tokens, max_tokens=min_tokens + more, ranges=ranges(*pairs)
        )
    except InputError:
        assert pairs or not text.strip(), "any text can be quoted where no ranges are given"
        return
    output = []
    while not cursor.is_done:
        choices = [token for token in cursor.mask().ids.tolist() if token not in TOKENIZER.stop_ids]
        if not choices or (cursor.can_end and rng.random() < 0.3):
            break
        output.append(int(rng.choice(choices)))
        cursor.advance(output[-1:])
    written = b"".join(BYTES[token] for token in output).decode()
    ((at, quote),) = ((quoted.start, quoted.quote) for quoted in cursor.quotes())
    copied = text[quote.source_start : quote.source_end]
    assert at == 0
    assert written[quote.lead : quote.lead + len(copied)] == copied
    assert not (written[: quote.lead] + written[quote.lead + len(copied) :]).strip()
    assert len(output) <= min_tokens + more
    if pairs:
        assert quote.source_start in {a for a, _ in pairs}


def test_quotes_in_an_answer_carry_their_place_in_output_and_source():
    model = ToyModel(random_logits(TOKENIZER.vocab_size), vocab_size=TOKENIZER.vocab_size)
    sentence = QuoteFrom(("d",), min_tokens=1, ranges=ranges(*SENTENCES))
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
