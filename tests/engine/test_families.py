"""Every architecture answers through the engine, from its cache and with drafts as without."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ragflash.engine.build import start_engine
from ragflash.engine.client import EngineClient
from ragflash.engine.request import (
    ChatMessage,
    Finished,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from tests.engine.toys import StubDrafter
from tests.engine.trees import answer_of, wild_tree
from tests.models.families import FAMILIES
from tests.models.toy_files import TOKENS, write_gguf

RULES = "Answer from the document alone."
DOCUMENT = "Seals are replaced every year; the pressure is 16 bar. " * 5
NUM_TOKENS = 24
RECURRENT = [name for name in FAMILIES if name.startswith("qwen35")]


@dataclass(frozen=True)
class Toy:
    path: Path
    reference: torch.nn.Module

    def greedy(self, prompt: Sequence[int]) -> list[int]:
        """Go on greedily in transformers, everything anew for each token."""
        tokens = [*prompt]
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                logits = self.reference(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
            if TOKENS[tokens[-1]] in {"<|im_end|>", "<|endoftext|>"}:
                break
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Callable[[str], Toy]:
    made: dict[str, Toy] = {}

    def toy(name: str) -> Toy:
        if name not in made:
            family = FAMILIES[name]
            reference = family.build(seed=1, vocab_size=len(TOKENS))
            path = tmp_path_factory.mktemp(name) / "toy.gguf"
            tensors = family.tensors(reference)
            write_gguf(path, family.architecture, family.metadata, tensors, tokenizer=True)
            made[name] = Toy(path, reference)
        return made[name]

    return toy


def ask(engine: EngineClient, name: str, question: str) -> Finished:
    span = Span("manual", 0, 0, len(DOCUMENT))
    messages = (
        ChatMessage("system", (TextSegment(SegmentKind.RULES, RULES),)),
        ChatMessage(
            "user",
            (
                TextSegment(SegmentKind.DOCUMENT, DOCUMENT, (span,)),
                TextSegment(SegmentKind.QUESTION, question),
            ),
        ),
    )
    return asyncio.run(engine.complete(GenerateRequest(name, messages, max_tokens=NUM_TOKENS)))


def start(path: Path, drafter: StubDrafter) -> EngineClient:
    return start_engine(
        path,
        dtype="float32",
        kv_bytes=64 << 20,
        prefill_chunk_tokens=96,
        threads=1,
        drafter_factory=lambda job: drafter,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_as_transformers_does_from_the_cache_and_with_drafts(toys, name):
    toy = toys(name)
    prompts: dict[int, list[int]] = {}

    def listen(history: Sequence[int], budget: int) -> list[int]:
        prompts.setdefault(len(prompts), [*history])
        return []

    engine = start(toy.path, StubDrafter(listen))
    try:
        cold = ask(engine, "cold", "How often?")
        prompt = prompts[0][: cold.usage.prompt_tokens]
        assert [*cold.token_ids] == toy.greedy(prompt)[: len(cold.token_ids)]
        warm = ask(engine, "warm", "How often?")
        assert warm.usage.cached_tokens >= len(DOCUMENT)
        assert warm.token_ids == cold.token_ids
        assert engine.info().template.startswith("built-in")
    finally:
        engine.close()

    def draft(history: Sequence[int], budget: int) -> list[int]:
        """Know the answer, but err at every fifth token."""
        done = len(history) - len(prompt)
        rest = [*cold.token_ids][done : done + min(budget, 7)]
        return [t if (done + i) % 5 else (t + 1) % 256 for i, t in enumerate(rest)]

    trees = wild_tree(answer_of(cold.token_ids, len(prompt)), len(TOKENS))
    for drafter in (StubDrafter(draft), StubDrafter(trees)):
        engine = start(toy.path, drafter)
        try:
            for request in ("cold", "warm"):
                drafted = ask(engine, request, "How often?")
                assert drafted.token_ids == cold.token_ids
            assert sum(accepted for _, accepted in drafter.observed) > 0
            assert any(accepted < drafted for drafted, accepted in drafter.observed)
        finally:
            engine.close()


@pytest.mark.parametrize("name", RECURRENT)
def test_another_question_about_a_stored_document_finds_the_state_at_its_end(toys, name):
    toy = toys(name)
    silent = StubDrafter(lambda history, budget: [])
    engine = start(toy.path, silent)
    try:
        ask(engine, "first", "How often?")
        second = ask(engine, "second", "What pressure, and of what?")
        assert second.usage.cached_tokens >= len(DOCUMENT)
    finally:
        engine.close()
    engine = start(toy.path, silent)
    try:
        cold = ask(engine, "cold", "What pressure, and of what?")
    finally:
        engine.close()
    assert cold.usage.cached_tokens == 0
    assert second.token_ids == cold.token_ids
