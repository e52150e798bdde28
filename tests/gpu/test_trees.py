"""Trees of drafts on a card: the answer without drafts, up to the first near-tie."""

import asyncio
from contextlib import closing

import pytest

from ragflash.engine.build import start_engine
from ragflash.engine.request import ChatMessage, GenerateRequest, SegmentKind, TextSegment
from tests.engine.toys import StubDrafter
from tests.engine.trees import answer_of, wild_tree

NEAR = 0.5
QUESTION = "Write a sentence about the sea, then list three colours of the rainbow."
NUM_TREES = 6


def ask(client, name, max_tokens):
    segments = (TextSegment(SegmentKind.QUESTION, QUESTION),)
    request = GenerateRequest(
        name,
        (ChatMessage("user", segments),),
        max_tokens=max_tokens,
        logprobs=True,
        top_logprobs=10,
    )
    return asyncio.run(client.complete(request))


def start(path, device, drafter=None):
    dtype = {"dtype": "float32"} if device == "cpu" else {}
    factory = None if drafter is None else (lambda job: drafter)
    return start_engine(
        path, device=device, context_tokens=1024, max_slots=1, drafter_factory=factory, **dtype
    )


@pytest.mark.parametrize("model_path", ["smollm2", "gemma"], indirect=True)
def test_trees_write_what_is_written_without_them(model_path, device, is_small):
    max_tokens = 8 if is_small else 64
    with closing(start(model_path, device)) as client:
        plain = ask(client, "plain", max_tokens)
    same = 0
    for seed in range(1 if is_small else NUM_TREES):
        right = answer_of(plain.token_ids, plain.usage.prompt_tokens)
        drafter = StubDrafter(wild_tree(right, 1000, seed))
        with closing(start(model_path, device, drafter)) as client:
            found = ask(client, f"tree {seed}", max_tokens)
        pairs = zip(plain.token_ids, found.token_ids, strict=False)
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        assert found.timings.draft_n_accepted > len(found.token_ids) // 4
        if first is None:
            assert len(plain.token_ids) == len(found.token_ids)
            same += 1
            continue
        told = plain.logprobs[first]
        others = {one.token_id: one.logprob for one in told.top}
        gap = told.chosen.logprob - others.get(found.token_ids[first], float("-inf"))
        print(f"{model_path.name}: differs at {first} of {len(plain.token_ids)}, {gap:.3f} nats")
        assert gap < NEAR
    print(f"{model_path.name}: {same} texts are the same to the end")
