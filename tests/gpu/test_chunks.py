"""Captured chunks against the same rows launched one by one, and steps that are begun early."""

import asyncio
from contextlib import closing

import pytest
import torch

from ragflash.engine.build import start_engine
from ragflash.engine.client import EngineClient
from ragflash.engine.reading import Reading
from ragflash.engine.request import (
    ChatMessage,
    GenerateRequest,
    SegmentKind,
    TextSegment,
)
from ragflash.models.device.chunks import Chunks
from ragflash.models.device.graphs import StepKind
from tests.gpu.reading import place, read_tokens

LENGTHS = ((33, 500), (512, 40, 700), (255, 2, 64), (1500,))
MODELS = ("smollm2", "gemma")


@pytest.fixture
def on_card(device) -> None:
    if device != "cuda":
        pytest.skip("a processor captures nothing")


def read(placed, tokens, lengths) -> torch.Tensor:
    """Read parts of given lengths; return the logits of the last row of each."""
    reading, start, logits = Reading(placed, len(tokens)), 0, []
    for length in lengths:
        logits.append(reading.feed(tokens[start : start + length])[-1:].cpu().clone())
        start += length
    reading.close()
    return torch.cat(logits)


@pytest.mark.parametrize("model_path", MODELS, indirect=True)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_captured_chunks_equal_launched_ones(model_path, lengths, device, on_card, monkeypatch):
    tokens = read_tokens(model_path, 2048)
    placed = place(model_path, device, context_tokens=4096, kv_format="q8_0")
    found = read(placed, tokens, lengths)
    read(placed, tokens[300:], (400,))
    again = read(placed, tokens, lengths)
    monkeypatch.setattr(Chunks, "take", lambda *_: False)
    expected = read(placed, tokens, lengths)
    error = (found - expected).square().mean(-1).sqrt() / expected.std(-1)
    print(f"{model_path.name}, {lengths}: {error.max():.4f}")
    assert torch.equal(found, again)
    assert error.max() < 0.05


def test_nobodys_packed_pages_change_no_bit(smollm2_path, device, on_card, monkeypatch):
    """Steps that leave them out, against steps that attend to none of them."""
    tokens = read_tokens(smollm2_path, 300)
    placed = place(smollm2_path, device, context_tokens=8192, kv_format="q8_0")
    lengths = (200, 1, 1, 2, 7, 16, 32, 1)
    found = read(placed, tokens, lengths)
    replay = placed.model._graphs
    monkeypatch.setattr(
        placed.model, "_graphs", lambda kind: replay(StepKind(kind.num_rows, has_packed=True))
    )
    assert torch.equal(read(placed, tokens, lengths), found)


def request_of(question: str, name: str, **options) -> GenerateRequest:
    segment = TextSegment(SegmentKind.QUESTION, question)
    return GenerateRequest(name, (ChatMessage("user", (segment,)),), **options)


def ask(client: EngineClient, question: str, **options) -> tuple[int, ...]:
    return asyncio.run(client.complete(request_of(question, "r", **options))).token_ids


PLAIN = {"max_tokens": 300, "cache": False}  # longer than a page


@pytest.mark.parametrize("question", ["Tell a story.", "Name all planets and their moons. " * 20])
def test_tokens_chosen_on_the_card_are_those_of_the_logits(question, smollm2_path, device, on_card):
    with closing(start_engine(smollm2_path, device=device, context_tokens=8192)) as client:
        expected = ask(client, question, logprobs=True, **PLAIN)
        assert ask(client, question, **PLAIN) == expected


def test_answers_that_are_begun_early_together_equal_each_alone(smollm2_path, device, on_card):
    engine = start_engine(smollm2_path, device=device, context_tokens=8192, exact=True)
    with closing(engine) as client:
        expected = ask(client, "Tell a story.", logprobs=True, **PLAIN)

        async def together() -> list[tuple[int, ...]]:
            requests = [request_of("Tell a story.", f"r{at}", **PLAIN) for at in range(4)]
            answers = await asyncio.gather(*map(client.complete, requests))
            return [answer.token_ids for answer in answers]

        assert asyncio.run(together()) == [expected] * 4
