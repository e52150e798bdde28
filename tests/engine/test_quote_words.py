"""Quotes from word to word, against an oracle that looks at every character."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.engine.constrain import ConstraintCompiler
from ragflash.engine.constrain.words import Words
from ragflash.engine.constraint import Literal, QuoteFrom
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import (
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.errors import InputError
from tests.engine import quotable
from tests.engine.toys import RawTemplate, ToyTokenizer, byte_tokenizer, document, question, user

TOKENIZER = byte_tokenizer(
    *(" the", " cat", "the", "cat", "at", " sat.\n", "sat", ".\n", ". ", "é ", " (", "ca", "t s"),
    *("中", "文", "中文", "\r\n", " | ", "😀", "x_y", "  ", "e cat s", "he", "ﬁ"),
)
BYTES = tuple(map(TOKENIZER.token_bytes, range(TOKENIZER.vocab_size)))
UNITS = st.sampled_from(
    [
        *("the", "cat", "sat.", "a", "é", "ﬁne", "x_y", "3.14", "don't", "(the", "cat)", '"a"'),
        *(
            "中文",
            "中",
            "語。",
            "가나",
            "😀",
            "👩\u200d💻",
            "e\u0301",
            "ไทย",
            "—",
            "|",
            "-",
            "f(x);",
        ),
    ]
)
GLUE = st.sampled_from([" ", " ", " ", "  ", "\n", "\r\n", "\n\n", " | ", "\t", ""])


@st.composite
def texts(draw, *, most=14):
    units = draw(st.lists(st.tuples(UNITS, GLUE), min_size=1, max_size=most))
    return "".join(unit + glue for unit, glue in units)


def quoting(text, **options):
    return start(QuoteFrom(("d",), **options), document(text, "d", head="Doc: "))


def start(constraint, *segments):
    prompt = compile_prompt(user(*segments, question("?")), RawTemplate(), TOKENIZER)
    return ConstraintCompiler(TOKENIZER, BYTES).compile(constraint, prompt)


def permitted(cursor):
    mask = cursor.mask()
    stop = TOKENIZER.stop_ids
    return {at for at in range(TOKENIZER.vocab_size) if mask.permits(at)} - stop


@given(texts())
def test_boundaries_are_those_of_the_oracle(text):
    words = Words.of(text + "\n")
    starts, ends = quotable.boundaries(text)
    assert {*np.flatnonzero(words.is_start).tolist()} == starts
    assert {*np.flatnonzero(words.is_end).tolist()} == ends
    whole = {*zip(words.cell_start.tolist(), words.cell_end.tolist(), strict=True)}
    assert {cell for cell in whole if cell[1] < len(text)} == quotable.cells(text)


def own_tokens(text):
    """The prompt's tokens, by the byte that each begins at."""
    head = "Doc: "
    tokens, at, found = TOKENIZER.encode(head + text), -len(head), {}
    for token in tokens:
        found[at] = token
        at += len(BYTES[token])
    return found


def places(text, wanted, written):
    """Where in the text a longer quote goes on that begins with what is written."""
    starts = quotable.boundaries(text)[0]
    for start in starts:
        rest = text[start:].encode()
        if any(
            rest.startswith(quote) and quote.startswith(written) and quote != written
            for quote in wanted
        ):
            yield len(text[:start].encode()) + len(written)


@settings(max_examples=60)
@given(texts(), st.integers(1, 4), st.integers(1, 60), st.integers(0, 2**32))
def test_a_token_is_permitted_if_and_only_if_a_quote_goes_on_with_it(text, least, most, seed):
    wanted = [text[start:end].encode() for start, end in quotable.quotes(text, least, most)]
    try:
        cursor = quoting(text, min_words=least, max_characters=most)
    except InputError:
        assert not wanted
        return
    assert wanted
    rng, written = np.random.default_rng(seed), b""
    while not cursor.is_done:
        going = [quote for quote in wanted if quote.startswith(written) and quote != written]
        expected = {
            token
            for token, data in enumerate(BYTES)
            if data and any(quote.startswith(written + data) for quote in going)
        }
        assert cursor.can_end == (written in wanted)
        allowed = permitted(cursor)
        if allowed != expected:  # forced: what the prompt goes on with wherever the quote stands
            assert allowed <= expected
            assert {*map(own_tokens(text).get, places(text, wanted, written))} == allowed
        token = int(rng.choice(sorted(allowed)))
        assert cursor.num_permitted([token]) == 1
        cursor.advance([token])
        written += BYTES[token]
    assert written in wanted


@settings(max_examples=30)
@given(texts(), st.integers(0, 2**32))
def test_going_back_is_never_having_been_there(text, seed):
    rng = np.random.default_rng(seed)
    constraint = (QuoteFrom(("d",), min_words=1), Literal('"'))
    try:
        cursor = start(constraint, document(text, "d"))
    except InputError:
        return
    seen = [(permitted(cursor), cursor.can_end, cursor.quotes())]
    for _ in range(12):
        if cursor.is_done:
            break
        cursor.advance([int(rng.choice(sorted(seen[-1][0])))])
        seen.append((permitted(cursor), cursor.can_end, cursor.quotes()))
    while len(seen) > 1:
        back = int(rng.integers(1, len(seen)))
        del seen[-back:]
        cursor.rollback(back)
        assert (permitted(cursor), cursor.can_end, cursor.quotes()) == seen[-1]


SOURCES = {
    "prose": "The cat sat on the mat, and the cat ran away. Nobody saw the cat again.\n" * 2,
    "ligatures": "The ﬁrst ofﬁce oﬀers eﬃcient ﬂows of ﬁnance to all oﬃcers of the staﬀ.\n",
    "chinese": "保修期為自交貨之日起二十四個月。海上使用時，保修期為十二個月。詳見第三章。\n",
    "emoji": "We 👩\u200d💻 like 🇩🇪 flags, e\u0301toile and ❤️\u200d🔥 hearts in every chat 😀!\n",
    "code": "def f(x_y: int) -> int:\n    return x_y + 3.14  # don't round\n\nassert f(1) == 4\n",
    "crlf": "Title\r\nThe cat sat on the mat.\r\n\r\nName | Value | Unit\r\nWeight | 3.5 | kg\r\n",
    "thai": "ระยะเวลารับประกันยี่สิบสี่เดือนนับจากวันส่งมอบ\n",
}


def generate(cursor, rng):
    """Follow masks at random to an end, one that is reached or one that is chosen."""
    output: list[int] = []
    while not cursor.is_done:
        ids = cursor.mask().ids
        token = int(ids[rng.integers(len(ids))])
        if token in TOKENIZER.stop_ids:
            break
        cursor.advance([token])
        forced = cursor.forced(int(rng.integers(1, 20)))
        cursor.advance(forced)
        output += [token, *forced]
    return b"".join(BYTES[token] for token in output).decode()


def check_generations(name, num_generations):
    text, rng = SOURCES[name], np.random.default_rng(1)
    constraint = QuoteFrom(("d",))
    prompt = compile_prompt(user(document(text, "d"), question("?")), RawTemplate(), TOKENIZER)
    compiler = ConstraintCompiler(TOKENIZER, BYTES)
    allowed = {text[start:end] for start, end in quotable.quotes(text, 5, 1200)}
    seen = set()
    for _ in range(num_generations):
        cursor = compiler.compile(constraint, prompt)
        written = generate(cursor, rng)
        ((at, quote),) = ((quoted.start, quoted.quote) for quoted in cursor.quotes())
        assert at == 0
        assert text[quote.source_start : quote.source_end] == written
        assert written in allowed
        seen.add(written)
    assert len(seen) > 1


@pytest.mark.parametrize("name", SOURCES)
def test_random_quotes_are_verbatim(name):
    check_generations(name, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_ten_thousand_random_quotes_are_verbatim(name):
    check_generations(name, 10_000 // len(SOURCES) + 1)


def walk(cursor, text):
    for token in TOKENIZER.encode(text):
        assert cursor.num_permitted([token]) == 1, text
        cursor.advance([token])
    return cursor


def spelled(token_ids):
    return b"".join(BYTES[token] for token in token_ids).decode()


def test_a_quote_may_start_inside_a_token_of_the_prompt_and_be_spelled_anyhow():
    text = "so the cat sat.\nthe end of it all"
    assert " cat" in {spelled([token]) for token in TOKENIZER.encode(text)}
    cursor = quoting(text, min_words=2)
    assert {spelled([token]) for token in permitted(cursor)} >= {"c", "ca", "cat", "the", "t"}
    cursor.advance(TOKENIZER.encode("ca"))
    assert {spelled([token]) for token in permitted(cursor)} == {"t", "t s"}


def test_a_single_continuation_is_the_prompts_own_tokens_in_one_block():
    text = "zebra (the cat sat.\nthe end"
    cursor = walk(quoting(text), "zebra")
    own = TOKENIZER.encode(text)[len("zebra") :]
    forced = cursor.forced(100)
    assert list(forced) == own[: len(forced)]
    assert spelled(forced) == " (the cat"  # the line may end inside the next token
    assert cursor.forced(2) == forced[:2]
    assert cursor.num_tokens == 5


def test_what_all_places_go_on_with_is_forced_too():
    text = "a the cat ran.\nb the cat sat.\n"
    cursor = walk(quoting(text, min_words=3), "the")
    assert spelled(cursor.forced(10)) == " cat "


def test_a_word_is_not_forced_over_a_place_to_end_at():
    cursor = walk(quoting("one two x sat.\nmore of it", min_words=3), "one two x")
    assert cursor.can_end
    assert {spelled([token]) for token in permitted(cursor)} == {" ", " sat.\n"}
    cursor.advance(TOKENIZER.encode(" "))
    assert {spelled([token]) for token in permitted(cursor)} == {"s", "sat"}


def test_short_quotes_are_whole_cells_and_headings():
    text = "Title\nName | Part number | Unit\nthe cat sat on\n"
    cursor = quoting(text)
    for whole in ("Title", "Name", "Part number", "Unit"):
        assert walk(cursor, whole).can_end, whole
        cursor.rollback(cursor.num_tokens)
    for part in ("Part", "number", "the cat"):
        assert not walk(cursor, part).can_end, part
        cursor.rollback(cursor.num_tokens)


def test_a_line_that_the_prompt_shows_in_part_is_no_heading():
    spans = (Span("d", 10, 0, 4), Span("d", 40, 6, 21))
    segment = TextSegment(SegmentKind.DOCUMENT, "cat\n\n\nthe cat sat on a mat\n", spans)
    cursor = start(QuoteFrom(("d",)), segment)
    assert not walk(cursor, "cat").can_end


def test_numbers_and_words_are_not_cut():
    text = "it costs 3.14 don't well-known x_y now"
    starts, ends = quotable.boundaries(text)
    inner = {text.index(part) for part in ("14", ".14", "'t", "t well", "-known", "known", "_y")}
    assert not inner & (starts | ends)


def test_a_character_without_a_token_parts_the_text():
    pieces = [bytes([value]) for value in range(256) if value != 0xC3]
    tokenizer = ToyTokenizer([*pieces, "é".encode()], controls=("<|end|>",), stop=("<|end|>",))
    data = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
    text = "one two é three four five\n"
    prompt = compile_prompt(user(document(text, "d"), question("?")), RawTemplate(), tokenizer)
    cursor = ConstraintCompiler(tokenizer, data).compile(QuoteFrom(("d",), min_words=2), prompt)
    first = {data[token] for token in cursor.mask().ids.tolist()}
    assert first == {b"o", b"t", b"f"}
    cursor.advance(tokenizer.encode("one two"))
    assert cursor.is_done
