"""Formats of keys and values with whole models: what the engine says, answers from the cache."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

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
from ragflash.errors import SettingInvalid
from tests.engine.toys import StubDrafter
from tests.engine.trees import answer_of, wild_tree
from tests.models.families import FAMILIES
from tests.models.toy_files import TOKENS, write_gguf

# The last block begins at token 768: in a question about the first, within the second.
DOCUMENTS = ["".join(random.Random(3).choices("abcdefgh .\n", k=length)) for length in (742, 790)]


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("toys"), dict[str, Path]()

    def toy(name: str) -> Path:
        if name not in made:
            family = FAMILIES[name]
            tensors = family.tensors(family.build(seed=1, vocab_size=len(TOKENS)))
            made[name] = folder / f"{name}.gguf"
            write_gguf(made[name], family.architecture, family.metadata, tensors, tokenizer=True)
        return made[name]

    return toy


def start(path: Path, kv_format, **options) -> EngineClient:
    defaults = {"dtype": "float32", "kv_bytes": 16 << 20, "threads": 1, "grid_tokens": 256}
    return start_engine(
        path, device="cpu", kv_format=kv_format, prefill_chunk_tokens=96, **{**defaults, **options}
    )


def ask(
    engine: EngineClient, question: str, document: str = DOCUMENTS[0], max_tokens: int = 8
) -> Finished:
    span = Span("manual", 0, 0, len(document))
    segments = (
        TextSegment(SegmentKind.DOCUMENT, document, (span,)),
        TextSegment(SegmentKind.QUESTION, question),
    )
    request = GenerateRequest(
        "r", (ChatMessage("user", segments),), max_tokens=max_tokens, logprobs=True
    )
    return asyncio.run(engine.complete(request))


# Attention alone, with a window, with a window and shared layers, with recurrent layers.
@pytest.mark.parametrize(
    ("name", "kv_format"),
    [("qwen3", "q8_0"), ("gemma3", "tq3_0"), ("gemma4-small", "q8_0"), ("qwen35", "tq3_0")],
)
def test_an_answer_from_the_cache_equals_a_cold_one_bit_for_bit(toys, name, kv_format):
    path = toys(name)
    engine = start(path, kv_format)
    try:
        for document in DOCUMENTS:
            ask(engine, "What?", document, max_tokens=0)
        warm = [ask(engine, "How often?", document) for document in DOCUMENTS]
        assert all(found.usage.cached_tokens >= 742 for found in warm)
    finally:
        engine.close()
    engine = start(path, kv_format)
    try:
        cold = [ask(engine, "How often?", document) for document in DOCUMENTS]
        assert all(found.usage.cached_tokens < 100 for found in cold)
    finally:
        engine.close()
    assert [found.token_ids for found in warm] == [found.token_ids for found in cold]
    assert [found.logprobs for found in warm] == [found.logprobs for found in cold]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_drafts_do_not_change_an_answer(toys, name, shape):
    engine = start(toys(name), "q8_0")
    try:
        plain = ask(engine, "How often?")
    finally:
        engine.close()

    def draft(history, budget):
        """Know the answer, but err at every fifth token."""
        done = len(history) - plain.usage.prompt_tokens
        rest = plain.token_ids[done : done + min(budget, 7)]
        return [t if (done + i) % 5 else (t + 1) % 256 for i, t in enumerate(rest)]

    trees = wild_tree(answer_of(plain.token_ids, plain.usage.prompt_tokens), len(TOKENS))
    drafter = StubDrafter(draft if shape == "chain" else trees)
    engine = start(toys(name), "q8_0", drafter_factory=lambda job: drafter)
    try:
        assert ask(engine, "How often?").token_ids == plain.token_ids
        assert sum(accepted for _, accepted in drafter.observed) > 0
    finally:
        engine.close()


def test_formats_and_grids_share_no_segments(toys):
    path = toys("qwen3")
    identities = set()
    for kv_format, grid in (("auto", 256), ("q8_0", 256), ("q8_0", 512), ("tq4", 256)):
        engine = start(path, kv_format, grid_tokens=grid)
        identities.add(engine._worker._core._identity)
        engine.close()
    assert len(identities) == 4


def test_keys_and_values_are_kept_exactly_unless_a_format_is_named(toys):
    engine = start(toys("qwen3"), "auto")
    assert engine.info().kv_format == "float32"
    engine.close()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"kv_format": "f16"}, "choose auto"),
        ({"kv_format": "q8_0", "grid_tokens": 300}, "grid of 300"),
        ({"kv_format": "q8_0", "kv_bytes": 1000}, "hold no page"),
        ({"kv_format": "auto", "kv_bytes": 1000}, "hold no page"),
    ],
)
def test_what_cannot_be_stored_is_refused(toys, options, fault):
    with pytest.raises(SettingInvalid, match=fault):
        start(toys("qwen3"), **options)


@pytest.mark.parametrize("kv_format", ["auto", "q8_0"])
def test_a_named_context_is_what_sequences_share(toys, kv_format):
    engine = start(toys("qwen3"), kv_format, context_tokens=512, max_slots=1)
    allocators = engine._worker._core._scheduler._allocators
    assert allocators.exact.num_pages == (2 if kv_format == "auto" else 6)
    assert 512 <= engine.info().context_tokens <= 1024
    engine.close()
