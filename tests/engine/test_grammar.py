import json

import jsonschema
import numpy as np
import pytest

from ragflash.engine.constrain import ConstraintCompiler
from ragflash.engine.constraint import Free, Grammar, GrammarDialect, Literal
from ragflash.engine.prompt import compile_prompt
from ragflash.engine.request import FinishReason, SamplingParams
from ragflash.errors import InputError
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    RawTemplate,
    ToyModel,
    ask,
    byte_tokenizer,
    one_hot,
    question,
    random_logits,
    user,
)

TOKENIZER = byte_tokenizer(
    *('{"', '"}', '": "', "covered", "yes", "no", "maybe", ', "', "true", "é", "中文", "10", "]}")
)
BYTES = tuple(map(TOKENIZER.token_bytes, range(TOKENIZER.vocab_size)))
STOP = min(TOKENIZER.stop_ids)
COMPILER = ConstraintCompiler(TOKENIZER, BYTES)
COVERED = {
    "type": "object",
    "properties": {"covered": {"enum": ["yes", "no"]}},
    "required": ["covered"],
    "additionalProperties": False,
}
SHORT = {"type": "string", "maxLength": 5}
SCHEMAS = {
    "enum": COVERED,
    "unicode": {"enum": ["é", "中文", 'quo"te', "new\nline", None, True, 10]},
    "nested": {
        "type": "object",
        "properties": {
            "name": SHORT,
            "pages": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3},
            "inner": {"type": "object", "properties": {"a": SHORT}, "required": ["a"]},
        },
        "required": ["name", "pages"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": "no"}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "recursive": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "$ref": "#/$defs/tree",
    },
    "root array": {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 1, "maxItems": 3},
}


def grammar(schema):
    return Grammar(GrammarDialect.JSON_SCHEMA, json.dumps(schema))


def start(*parts):
    prompt = compile_prompt(user(question("?")), RawTemplate(), TOKENIZER)
    return COMPILER.compile(parts, prompt)


def permitted(cursor):
    mask = cursor.mask()
    return {token for token in range(TOKENIZER.vocab_size) if mask.permits(token)}


def spelled(token_ids):
    return b"".join(BYTES[token] for token in token_ids).decode()


def generate(cursor, rng, *, most=400):
    output: list[int] = []
    while not cursor.is_done and len(output) < most:
        forced = cursor.forced(8)
        cursor.advance(forced)
        output += forced
        if cursor.is_done:
            break
        token = int(rng.choice(sorted(permitted(cursor))))
        if token == STOP:
            break
        cursor.advance([token])
        output.append(token)
    return output


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_is_an_instance_of_the_schema(name):
    rng, num_complete = np.random.default_rng(0), 0
    for _ in range(30):
        cursor = start(grammar(SCHEMAS[name]))
        output = generate(cursor, rng)
        if cursor.can_end:
            num_complete += 1
            jsonschema.validate(json.loads(spelled(output)), SCHEMAS[name])
    assert num_complete > 10


@pytest.mark.parametrize("name", SCHEMAS)
def test_going_back_is_never_having_been_there(name):
    rng = np.random.default_rng(1)
    for _ in range(5):
        cursor = start(Literal("é"), grammar(SCHEMAS[name]), Free(until="#"))
        seen = [(permitted(cursor), cursor.can_end, cursor.forced(9))]
        while len(seen) < 25 and not cursor.is_done:
            token = int(rng.choice(sorted(seen[-1][0] - {STOP})))
            assert cursor.num_permitted([token]) == 1
            cursor.advance([token])
            seen.append((permitted(cursor), cursor.can_end, cursor.forced(9)))
            if rng.random() < 0.3:
                back = int(rng.integers(1, len(seen)))
                del seen[-back:]
                cursor.rollback(back)
                assert (permitted(cursor), cursor.can_end, cursor.forced(9)) == seen[-1]
                if rng.random() < 0.1:
                    break


def test_a_real_vocabulary(packaged_model_path):
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(packaged_model_path))
    token_bytes = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
    compiler = ConstraintCompiler(tokenizer, token_bytes)
    prompt = compile_prompt(user(question("?")), RawTemplate(), tokenizer)
    rng = np.random.default_rng(0)
    for _ in range(5):
        cursor, output = compiler.compile(grammar(COVERED), prompt), []
        assert list(cursor.forced(9)) == tokenizer.encode('{"covered": "')
        while not cursor.is_done:
            output.append(int(rng.choice(cursor.mask().ids)))
            cursor.advance(output[-1:])
        assert json.loads(tokenizer.decode(output))["covered"] in {"yes", "no"}
    cursor = compiler.compile(grammar({"type": "object"}), prompt)
    cursor.advance(tokenizer.encode('{"a": "'))
    mask = cursor.mask()
    assert mask.permits(tokenizer.encode("word")[0])
    assert not any(map(mask.permits, tokenizer.stop_ids))


def test_what_the_schema_fixes_is_forced_as_the_tokenizer_spells_it():
    cursor = start(grammar(COVERED))
    assert list(cursor.forced(100)) == TOKENIZER.encode('{"covered": "')
    assert list(cursor.forced(2)) == TOKENIZER.encode('{"covered": "')[:2]
    cursor.advance(cursor.forced(100))
    assert cursor.forced(100) == ()
    cursor.advance(TOKENIZER.encode("n"))
    assert spelled(cursor.forced(100)) == 'o"}'


def test_a_complete_text_can_only_end():
    cursor = start(grammar(COVERED))
    cursor.advance(TOKENIZER.encode('{"covered": "no"}'))
    assert (cursor.is_done, cursor.can_end) == (True, True)
    assert permitted(cursor) == {STOP}


def test_draft_is_cut_before_the_first_token_that_the_grammar_forbids():
    cursor = start(grammar(COVERED))
    assert cursor.num_permitted(TOKENIZER.encode('{"covered": "maybe"}')) == 3
    assert cursor.num_permitted(TOKENIZER.encode('{"covered": "no"}, more')) == 5
    assert cursor.num_permitted([STOP]) == 0
    assert cursor.num_tokens == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"type": "objekt"}', "objekt"),
        ('{"type": "string", "pattern": "("}', "unclosed"),
        ('{"$ref": "#/nowhere"}', "/nowhere"),
        ('{"not": {}}', "not"),
        ('{"enum": []}', "Unsatisfiable"),
        ('{"$ref": "http://example.com/schema"}', "retrieving it failed"),
        ("[]", "object"),
        ("{", "EOF"),
        ('{"enum": ["\\ud800"]}', "hex escape"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_with_the_reason(text, reason):
    with pytest.raises(InputError, match=reason):
        start(Grammar(GrammarDialect.JSON_SCHEMA, text))


def prefers(*values):
    """A model that writes an object whose value is the first of `values` that may follow."""
    after = TOKENIZER.encode('": "')[-1]

    def logits(history):
        scores = 0.01 * random_logits(TOKENIZER.vocab_size)(history)
        if history[-1] == after:
            for rank, value in enumerate(values):
                scores += one_hot([TOKENIZER.encode(value)[0]], TOKENIZER.vocab_size)[0] / (
                    rank + 1
                )
        scores[TOKENIZER.encode('"}')[0]] += 0.5
        return scores

    return ToyModel(logits, vocab_size=TOKENIZER.vocab_size)


def write(model, constraint, **options):
    with toy_engine(model, TOKENIZER, **options) as engine:
        prompt = '{"covered": "maybe"}' * 10
        finished = engine.complete(ask(prompt, constraint=constraint, max_tokens=50))
        return finished, engine.runner


@pytest.mark.parametrize("draft_tokens", [1, 3, 15])
def test_o07_schema_and_lookup(draft_tokens):
    """What is looked up in the document is forbidden; the model's next best is not."""

    def lookup(history, budget):
        text = b"".join(BYTES[token] for token in history)
        document = b'{"covered": "maybe"}' * 10
        suffix = next((text[-n:] for n in range(12, 2, -1) if text[-n:] in document), None)
        if suffix is None:
            return []
        at = document.index(suffix) + len(suffix)
        return TOKENIZER.encode(document[at:].decode())[:budget]

    constraint = grammar(COVERED)
    plain, _ = write(prefers("maybe", "no", "yes"), constraint)
    drafted, _ = write(
        prefers("maybe", "no", "yes"), constraint, draft=lookup, draft_tokens=draft_tokens
    )
    assert plain.text == drafted.text == '{"covered": "no"}'
    assert drafted.token_ids == plain.token_ids
    assert drafted.reason is FinishReason.CONSTRAINT


def test_object_completes_in_the_middle_of_a_draft():
    def draft(history, budget):
        return TOKENIZER.encode('no"}no"}')[:budget]

    finished, runner = write(prefers("no"), grammar(COVERED), draft=draft)
    assert (finished.text, finished.reason) == ('{"covered": "no"}', FinishReason.CONSTRAINT)
    assert runner.num_forwards == 1


def test_several_objects_at_once_and_sampled():
    model = ToyModel(random_logits(TOKENIZER.vocab_size), vocab_size=TOKENIZER.vocab_size)
    with toy_engine(model, TOKENIZER) as engine:
        requests = [
            ask(
                f"{at}",
                name=f"r{at}",
                constraint=grammar(SCHEMAS["nested"]),
                max_tokens=300,
                sampling=SamplingParams(temperature=1.0, seed=at),
            )
            for at in range(6)
        ]
        for finished in engine.complete_all(requests):
            if finished.reason is FinishReason.CONSTRAINT:
                jsonschema.validate(json.loads(finished.text), SCHEMAS["nested"])
            else:
                assert finished.reason is FinishReason.LENGTH
        engine.assert_pages_are_accounted_for()
