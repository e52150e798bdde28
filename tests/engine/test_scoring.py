import asyncio

import pytest
import torch

from ragflash.engine.request import Finished, FinishReason, Scored, ScoreRequest
from ragflash.errors import ContextTooLong, InputError
from tests.engine.harness import toy_engine
from tests.engine.toys import (
    ToyModel,
    ToyRecurrentModel,
    byte_tokenizer,
    document,
    question,
    random_logits,
    user,
)

TOKENIZER = byte_tokenizer()
LOGITS = random_logits(TOKENIZER.vocab_size)


def expected_logprob(prompt: bytes, target: bytes) -> float:
    total, history = 0.0, [*prompt]
    for token in target:
        total += float(torch.log_softmax(LOGITS(history), dim=-1)[token])
        history.append(token)
    return total


def request(*targets, text="what?", **options):
    return ScoreRequest("s", user(document("the text", "d"), question(text)), targets, **options)


def test_every_target_is_scored_after_the_same_prompt():
    model = ToyModel(LOGITS, vocab_size=TOKENIZER.vocab_size)
    with toy_engine(model, TOKENIZER) as engine:
        events = engine.events(request("yes", "no", "y"))
        scored, finished = events[-2:]
        assert isinstance(scored, Scored)
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.SCORED
        assert scored.num_tokens == (3, 2, 1)
        prompt = b"the textwhat?"
        assert scored.logprobs == pytest.approx(
            [expected_logprob(prompt, target) for target in (b"yes", b"no", b"y")], abs=1e-4
        )
        assert finished.timings.forward_rows == len(prompt) - 1 + 3 + 2 + 1
        engine.assert_pages_are_accounted_for()


def test_many_requests_share_forwards():
    model = ToyModel(LOGITS, vocab_size=TOKENIZER.vocab_size)
    with toy_engine(model, TOKENIZER, max_slots=8) as engine:

        async def score_all():
            texts = [f"question {at}?" for at in range(8)]
            return await asyncio.gather(
                *(engine.client.score(request("yes", text=text)) for text in texts)
            )

        for at, scored in enumerate(asyncio.run(score_all())):
            expected = expected_logprob(f"the textquestion {at}?".encode(), b"yes")
            assert scored.logprobs[0] == pytest.approx(expected, abs=1e-4)


def test_recurrent_state_is_that_of_the_prompt_for_every_target():
    def scores(*targets):
        model = ToyRecurrentModel(vocab_size=TOKENIZER.vocab_size)
        with toy_engine(model, TOKENIZER) as engine:
            return asyncio.run(engine.client.score(request(*targets))).logprobs

    together = scores("ab", "cd", "e")
    assert together == (*scores("ab"), *scores("cd"), *scores("e"))


def test_prompt_of_one_token():
    model = ToyModel(LOGITS, vocab_size=TOKENIZER.vocab_size)
    with toy_engine(model, TOKENIZER) as engine:
        scored = asyncio.run(
            engine.client.score(ScoreRequest("s", user(question("x")), ("yes", "n")))
        )
        expected = [expected_logprob(b"x", b"yes"), expected_logprob(b"x", b"n")]
        assert scored.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("targets", [(), ("yes", "")])
def test_nothing_to_score_is_refused(targets):
    model = ToyModel(LOGITS, vocab_size=TOKENIZER.vocab_size)
    with toy_engine(model, TOKENIZER) as engine, pytest.raises(InputError):
        asyncio.run(engine.client.score(request(*targets)))


def test_target_beyond_the_context_is_refused():
    model = ToyModel(LOGITS, vocab_size=TOKENIZER.vocab_size, context_tokens=16)
    with toy_engine(model, TOKENIZER) as engine, pytest.raises(ContextTooLong):
        asyncio.run(engine.client.score(request("yes!")))


def test_plain_text_is_scored_without_the_chat_template():
    model = ToyModel(LOGITS, vocab_size=TOKENIZER.vocab_size)
    plain = ScoreRequest("p", targets=("ab",), text="some text")
    with toy_engine(model, TOKENIZER) as engine:
        *_, scored, _ = engine.events(plain)
    assert isinstance(scored, Scored)
    assert scored.logprobs == pytest.approx([expected_logprob(b"some text", b"ab")], abs=1e-4)
