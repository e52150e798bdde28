"""What a card writes is what a CPU writes, up to the first near-tie.

A near-tie is a token after which both could follow: the CPU's log-probabilities of the two are
closer than the card's arithmetic is to float32.
"""

import asyncio
from contextlib import closing

import pytest

from ragflash.engine.build import start_engine
from ragflash.engine.request import ChatMessage, GenerateRequest, SegmentKind, TextSegment
from tests.gpu.reading import logits_of, place

NEAR = 0.5
MOST_DIFFERING = 0.06
QUESTIONS = (
    "What is the capital of France?",
    "List three colours of the rainbow.",
    "Write a sentence about the sea.",
    "Why is the sky blue?",
    "How do you boil an egg?",
    "What does a librarian do all day?",
)


def ask(client, question, max_tokens):
    segments = (TextSegment(SegmentKind.QUESTION, question),)
    request = GenerateRequest(
        question,
        (ChatMessage("user", segments),),
        max_tokens=max_tokens,
        logprobs=True,
        top_logprobs=10,
    )
    return asyncio.run(client.complete(request))


models = pytest.mark.parametrize("model_path", ["smollm2", "gemma"], indirect=True)


def answer_all(path, where, count, max_tokens):
    dtype = {"dtype": "float32"} if where == "cpu" else {}
    client = start_engine(path, device=where, context_tokens=2048, max_slots=1, **dtype)
    with closing(client):
        return [ask(client, one, max_tokens) for one in QUESTIONS[:count]]


@models
def test_greedy_text_is_the_same_up_to_a_near_tie(model_path, device, is_small):
    count, max_tokens = (2, 8) if is_small else (len(QUESTIONS), 48)
    answers = [answer_all(model_path, where, count, max_tokens) for where in ("cpu", device)]
    same = 0
    for plain, found in zip(*answers, strict=True):
        pairs = zip(plain.token_ids, found.token_ids, strict=False)
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if first is None:
            assert len(plain.token_ids) == len(found.token_ids)
            same += 1
            continue
        logprobs = plain.logprobs[first]
        others = {one.token_id: one.logprob for one in logprobs.top}
        gap = logprobs.chosen.logprob - others.get(found.token_ids[first], float("-inf"))
        print(f"{model_path.name}: differs at {first} of {len(plain.token_ids)}, {gap:.3f} nats")
        assert gap < NEAR
    print(f"{model_path.name}: {same} of {count} texts are the same to the end")


@models
def test_along_a_text_of_the_cpu_a_card_chooses_alike(model_path, device, is_small):
    count, max_tokens = (2, 8) if is_small else (len(QUESTIONS), 48)
    answers = answer_all(model_path, "cpu", count, max_tokens)
    tokens = [token for answer in answers for token in answer.token_ids]
    logits = []
    for where in ("cpu", device):
        placed = place(model_path, where, context_tokens=1024, kv_format="f16")
        logits.append(logits_of(placed, tokens, rows=1 if where == device else 16))
    plain, found = logits
    chosen = found.argmax(-1, keepdim=True)
    gaps = (plain.amax(-1, keepdim=True) - plain.gather(1, chosen)).squeeze(1)
    differing = gaps[gaps > 0]
    print(f"{model_path.name}: {len(differing)} of {len(tokens)} differ, {differing.tolist()}")
    assert gaps.max() < NEAR
    assert len(differing) <= MOST_DIFFERING * len(tokens)
