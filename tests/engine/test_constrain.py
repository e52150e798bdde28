import pytest

from ragflash.engine.constrain import ConstraintCompiler
from ragflash.engine.constraint import Choice, Free, Literal
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import (
    FinishReason,
)
from ragflash.errors import InputError
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    END,
    RawTemplate,
    ToyModel,
    ask,
    byte_tokenizer,
    one_hot,
    question,
    random_logits,
    user,
)

TOKENIZER = byte_tokenizer("yes", "no", "maybe", " so", '."', '"\n')
BYTES = tuple(map(TOKENIZER.token_bytes, range(TOKENIZER.vocab_size)))
STOP = min(TOKENIZER.stop_ids)


def cursor(*parts):
    prompt = compile_prompt(user(question("?")), RawTemplate(), TOKENIZER)
    return ConstraintCompiler(TOKENIZER, BYTES).compile(parts, prompt)


def permitted(a_cursor):
    mask = a_cursor.mask()
    return {token for token in range(TOKENIZER.vocab_size) if mask.permits(token)}


def encode(text):
    return TOKENIZER.encode(text)


def wants(text):
    """A model that would write `text` after the prompt, then the stop token."""
    answer = [*encode(text), STOP]

    def logits(history):
        written = len(history) - 1
        scores = one_hot([answer[min(written, len(answer) - 1)]], TOKENIZER.vocab_size)[0]
        return scores + 0.01 * random_logits(TOKENIZER.vocab_size)(history)

    return ToyModel(logits, vocab_size=TOKENIZER.vocab_size)


def write(model, constraint, **options):
    with toy_engine(model, TOKENIZER, **options) as engine:
        finished = engine.complete(ask("?", constraint=constraint, max_tokens=50))
        return finished, engine.runner


def test_choice_is_exactly_one_of_its_texts():
    texts = ("yes", "no", "maybe so")
    for wanted in (*texts, "none of these"):
        finished, _ = write(wants(wanted), Choice(texts))
        assert finished.text in texts
        assert finished.reason is FinishReason.CONSTRAINT
        if wanted in texts:
            assert finished.text == wanted


@pytest.mark.parametrize(("wanted", "text"), [("maybe", "maybe"), ("maybe so", "maybe so")])
def test_choice_of_a_text_and_a_longer_one_is_left_to_the_model(wanted, text):
    finished, _ = write(wants(wanted), Choice(("maybe", "maybe so")))
    assert (finished.text, finished.reason) == (text, FinishReason.CONSTRAINT)


def test_literal_costs_no_decision():
    text = "a fixed text"
    finished, runner = write(wants("anything"), (Literal(text), Choice(("yes", "no"))))
    assert finished.text in {text + "yes", text + "no"}
    assert runner.num_forwards == 1
    assert runner.num_rows == 1 + len(encode(text))


def test_literal_alone_needs_no_forward():
    finished, runner = write(wants("anything"), Literal("done"))
    assert (finished.text, finished.reason) == ("done", FinishReason.CONSTRAINT)
    assert runner.num_forwards == 0


def test_free_text_ends_with_its_marker_and_nothing_after():
    finished, _ = write(wants('abc."\nyes'), Free(until='"'))
    assert finished.text == 'abc."'
    assert finished.reason is FinishReason.CONSTRAINT


def test_free_text_that_the_model_ends_ends_the_output():
    finished, _ = write(wants("abc"), (Free(until="#"), Literal("never")))
    assert (finished.text, finished.reason) == ("abc", FinishReason.STOP)


def test_free_text_is_cut_at_its_limit():
    finished, _ = write(wants("abcdefgh"), (Free(until="#", max_tokens=3), Literal("!")))
    assert finished.text == "abc!"


@pytest.mark.parametrize(
    ("written", "banned", "allowed"),
    [("", {'"\n'}, {'."'}), ("x", {'"\n'}, {'."', '"'})],
)
def test_tokens_that_overshoot_a_marker_are_banned(written, banned, allowed):
    a_cursor = cursor(Free(until='"'), Literal("z"))
    a_cursor.advance(encode(written))
    tokens = permitted(a_cursor)
    assert not tokens & {encode(text)[0] for text in banned}
    assert tokens >= {encode(text)[0] for text in allowed}


def test_marker_of_several_tokens_is_found_after_a_false_start():
    a_cursor = cursor(Free(until="aab"))
    a_cursor.advance(encode("aaa"))
    assert not a_cursor.is_done
    a_cursor.advance(encode("b"))
    assert a_cursor.is_done


def test_rollback_is_the_way_back_through_every_part():
    a_cursor = cursor(Choice(("yes", "no")), Literal("ab"), Free(until="#"), Choice(("x", "y")))
    tokens = encode("yesabc#x")
    masks = []
    for token in tokens:
        masks.append(permitted(a_cursor))
        a_cursor.advance((token,))
    assert a_cursor.is_done
    for mask in reversed(masks):
        a_cursor.rollback(1)
        assert permitted(a_cursor) == mask


def test_draft_is_cut_before_the_first_token_that_is_not_permitted():
    a_cursor = cursor(Choice(("yes", "maybe so")), Literal("!"))
    assert a_cursor.num_permitted(encode("maybe so!more")) == 3
    assert a_cursor.num_permitted(encode("maybe yes")) == 1
    assert a_cursor.num_permitted([STOP]) == 0
    assert a_cursor.num_tokens == 0


@pytest.mark.parametrize("draft_tokens", [1, 3, 15])
def test_drafts_do_not_change_constrained_output(draft_tokens):
    """The looked-up value is not permitted, the model's next best is."""
    constraint = (Literal('{"covered": "'), Choice(("yes", "no")), Literal('"}'))
    looked_up = encode('maybe"}')

    def draft(history, budget):
        return looked_up[:budget]

    plain, _ = write(wants("maybe"), constraint)
    drafted, _ = write(wants("maybe"), constraint, draft=draft, draft_tokens=draft_tokens)
    assert drafted.text == plain.text
    assert plain.text in {'{"covered": "yes"}', '{"covered": "no"}'}


def test_object_completes_in_the_middle_of_a_draft():
    def draft(history, budget):
        return encode('no"}no"}')[:budget]

    constraint = (Choice(("yes", "no")), Free(until="}"))
    finished, runner = write(wants('no"}more'), constraint, draft=draft)
    assert (finished.text, finished.reason) == ('no"}', FinishReason.CONSTRAINT)
    assert runner.num_forwards == 1


def test_stop_string_inside_forced_text():
    with toy_engine(wants("x"), TOKENIZER) as engine:
        finished = engine.complete(ask("?", constraint=Literal("abcd"), stop=("bc",)))
    assert (finished.text, finished.reason) == ("a", FinishReason.STOP)
    assert finished.usage.completion_tokens == 3


def test_length_cuts_forced_text():
    with toy_engine(wants("x"), TOKENIZER) as engine:
        finished = engine.complete(ask("?", constraint=Literal("abcd"), max_tokens=2))
    assert (finished.text, finished.reason) == ("ab", FinishReason.LENGTH)


@pytest.mark.parametrize(
    "constraint", [(), Choice(()), Choice(("yes", "")), Literal(""), Free(max_tokens=-1)]
)
def test_constraint_that_admits_nothing_is_refused(constraint):
    with pytest.raises(InputError):
        cursor(constraint)


def test_control_tokens_cannot_be_spelled():
    finished, _ = write(wants("x"), Literal(END))
    assert finished.text == END
    assert STOP not in finished.token_ids
