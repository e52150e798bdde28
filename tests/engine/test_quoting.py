"""Free text whose quotation marks are bound to documents, through a whole engine."""

import asyncio
import re

import numpy as np
import pytest

from ragflash.engine.constrain import ConstraintCompiler
from ragflash.engine.constrain.source_text import build_source_text
from ragflash.engine.constraint import Literal, QuoteFrom, Quoting
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import Delta, Finished, FinishReason, GenerateRequest, SamplingParams
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

SOURCE = (
    "The cat sat on the mat, and the ﬁrst dog ran away. Nobody saw 😀 the cat again.\r\n"
    "保修期為自交貨之日起二十四個月。\nName | Part number\n"
)
TOKENIZER = byte_tokenizer(
    *(
        "The",
        " cat",
        " the",
        " sat",
        "cat",
        " dog",
        ' "',
        '".',
        "\r\n",
        "保修",
        " | ",
        " ran",
        "\n",
    ),
    *(" is", " it", " so", " x", "a ", ". "),
)
BYTES = tuple(map(TOKENIZER.token_bytes, range(TOKENIZER.vocab_size)))
COMPILER = ConstraintCompiler(TOKENIZER, BYTES)
QUOTE = QuoteFrom(("d",))
MARK = TOKENIZER.encode('"')[0]


def start(*parts):
    messages = user(document(SOURCE, "d", head="Doc: "), question("?"))
    return COMPILER.compile(parts, compile_prompt(messages, RawTemplate(), TOKENIZER))


def walk(cursor, text):
    for token in TOKENIZER.encode(text):
        assert cursor.num_permitted([token]) == 1, text
        cursor.advance([token])
    return cursor


def test_between_marks_the_source_is_copied_and_outside_anything_goes():
    cursor = walk(start(Quoting(QUOTE)), "Well, ")
    assert cursor.num_permitted(TOKENIZER.encode('"xylophone')) == 1
    cursor = walk(cursor, '"')
    cursor = walk(cursor, "cat sat on the mat")
    assert cursor.mask().permits(MARK)
    cursor = walk(cursor, '" is it')
    (quoted,) = cursor.quotes()
    copied = SOURCE[quoted.quote.source_start : quoted.quote.source_end]
    assert copied == "cat sat on the mat"


def test_there_are_no_more_quotes_than_asked_for():
    cursor = start(Quoting(QUOTE, max_quotes=2))
    for _ in range(2):
        walk(cursor, 'so "Part number" ')
    writers = [token for token, data in enumerate(BYTES) if b'"' in data]
    assert len(writers) == 3
    assert cursor.num_permitted(TOKENIZER.encode("anything else")) > 5
    assert not any(cursor.num_permitted([token]) for token in writers)
    assert len(cursor.quotes()) == 2
    assert not any(map(start(Quoting(QUOTE, max_quotes=0)).mask().permits, writers))


def test_where_nothing_can_be_quoted_no_quote_begins():
    messages = user(document("too short", "d", head="Doc: "), question("?"))
    prompt = compile_prompt(messages, RawTemplate(), TOKENIZER)
    cursor = COMPILER.compile(Quoting(QUOTE), prompt)
    assert not cursor.mask().permits(MARK)
    with pytest.raises(InputError):
        COMPILER.compile(QUOTE, prompt)


def test_text_ends_at_its_marker_or_limit_before_any_quote():
    cursor = walk(start(Quoting(QUOTE, until="\n", max_tokens=4), Literal("!")), "a b\n")
    assert list(cursor.forced(9)) == TOKENIZER.encode("!")
    cursor = walk(start(Quoting(QUOTE, until="\n", max_tokens=4), Literal("!")), "abcd")
    assert list(cursor.forced(9)) == TOKENIZER.encode("!")


def test_a_mark_of_several_bytes_is_banned_however_it_is_spelled():
    cursor = start(Quoting(QUOTE, opening="<<", closing=">>", max_quotes=0))
    assert cursor.num_permitted(TOKENIZER.encode("<<")) == 1
    assert cursor.num_permitted(TOKENIZER.encode("a<b<c")) == 5


@pytest.mark.parametrize("options", [{"max_quotes": -1}, {"opening": ""}, {"closing": ""}])
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(InputError):
        start(Quoting(QUOTE, **options))


def model():
    """Likes quotation marks."""
    hidden = [*range(32), *range(127, 256)]
    scores = random_logits(TOKENIZER.vocab_size, never=hidden)

    def logits(history):
        found = scores(history)
        found[MARK] += 1.5
        return found

    return ToyModel(logits, vocab_size=TOKENIZER.vocab_size)


def request(name, **options):
    messages = user(document(SOURCE, "d", head="Doc:\n"), question(f"quote {name}"))
    options = {"constraint": Quoting(QUOTE), "max_tokens": 120} | options
    return GenerateRequest(name, messages, **options)


def check(finished: Finished) -> int:
    assert len(finished.quotes) <= 3
    for quote in finished.quotes:
        copied = SOURCE[quote.source_start : quote.source_end]
        assert finished.text[quote.start : quote.end] == copied
        assert finished.text[quote.start - 1] == '"'
    texts = [finished.text[quote.start : quote.end] for quote in finished.quotes]
    closed = re.findall('"([^"]*)"', finished.text)
    assert closed == texts[: len(closed)], "the last quote may not be closed"
    return len(texts)


SAMPLED = SamplingParams(temperature=1.2, seed=7, frequency_penalty=0.2)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_all_quotes_of_an_answer_are_copies_with_their_places(sampling):
    with toy_engine(model(), TOKENIZER, template=TurnTemplate()) as engine:
        requests = [request(f"r{at}", sampling=sampling) for at in range(6)]
        ended = engine.complete_all(requests)  # four slots
        assert sum(map(check, ended)) > 6
        alone = [engine.complete(each) for each in requests[:2]]
        assert [each.token_ids for each in alone] == [each.token_ids for each in ended[:2]]
        engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_nothing(sampling):
    rng = np.random.default_rng(0)
    asked = request("r", sampling=sampling)
    with toy_engine(model(), TOKENIZER) as engine:
        plain = engine.complete(asked)

    def draft(history, budget):
        """What comes next, up to a token that does not."""
        proposed = [*plain.token_ids[len(history) - plain.usage.prompt_tokens :][:budget]]
        proposed[int(rng.integers(len(proposed))) :] = [int(rng.integers(TOKENIZER.vocab_size))]
        return proposed

    with toy_engine(model(), TOKENIZER, draft=draft) as engine:
        drafted = engine.complete(asked)
    assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
    assert drafted.quotes == plain.quotes
    assert len(plain.quotes) > 0
    assert drafted.timings.draft_n > drafted.timings.draft_n_accepted > 0


def test_a_stream_is_the_text_and_a_stop_string_cuts_it():
    with toy_engine(model(), TOKENIZER) as engine:
        events = engine.events(request("r"))
        whole = events[-1]
        assert isinstance(whole, Finished)
        assert "".join(each.text for each in events if isinstance(each, Delta)) == whole.text
        inside = whole.text[whole.quotes[0].start + 3 :][:4]
        cut = engine.complete(request("r", stop=(inside,)))
        assert cut.text == whole.text.partition(inside)[0]
        assert cut.reason is FinishReason.STOP
        assert all(quote.end <= len(cut.text) for quote in cut.quotes)


def test_a_document_is_laid_out_once_and_forgotten_when_it_is_deleted(monkeypatch):
    built = []

    def build(*args):
        built.append(args)
        return build_source_text(*args)

    monkeypatch.setattr("ragflash.engine.constrain.compile.build_source_text", build)
    with toy_engine(model(), TOKENIZER) as engine:
        for name in ("one", "two"):
            engine.complete(request(name, max_tokens=5))
        assert len(built) == 1
        asyncio.run(engine.client.drop_source("d"))
        engine.complete(request("three", max_tokens=5))
        assert len(built) == 2
