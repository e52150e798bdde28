"""What a card writes is what a CPU writes, up to the first near-tie.

A near-tie is a token after which both could follow: the CPU's log-probabilities of the two are
closer than the card's arithmetic is to float32.
"""

import asyncio
from contextlib import closing

import pytest

from ragflash.engine.build import start_engine
from ragflash.engine.request import ChatMessage, GenerateRequest, SegmentKind, TextSegment

NEAR = 0.5
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


@pytest.mark.parametrize("model_path", ["smollm2", "gemma"], indirect=True)
def test_greedy_text_is_the_same_but_for_near_ties(model_path, device, is_small):
    count, max_tokens = (2, 8) if is_small else (len(QUESTIONS), 48)
    answers = []
    for where in ("cpu", device):
        dtype = {"dtype": "float32"} if where == "cpu" else {}
        client = start_engine(model_path, device=where, context_tokens=2048, max_slots=1, **dtype)
        with closing(client):
            answers.append([ask(client, one, max_tokens) for one in QUESTIONS[:count]])
    same = 0
    for plain, found in zip(*answers, strict=True):
        differing = [
            index
            for index, pair in enumerate(zip(plain.token_ids, found.token_ids, strict=False))
            if pair[0] != pair[1]
        ]
        if not differing:
            same += 1
            continue
        first = differing[0]
        chosen = found.token_ids[first]
        top = {one.token_id: one.logprob for one in plain.logprobs[first].top}
        gap = plain.logprobs[first].logprob - top.get(chosen, float("-inf"))
        print(f"{model_path.name}: differs at {first} of {len(plain.token_ids)}, {gap:.3f} nats")
        assert gap < NEAR
    print(f"{model_path.name}: {same} of {count} texts are the same to the end")
    assert same >= count // 3
