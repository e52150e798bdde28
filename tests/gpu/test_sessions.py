"""What a card has read comes back from files and answers bit for bit as it did."""

import asyncio
import os
import random
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ragflash.bench.filler import Filler
from ragflash.engine.build import start_engine
from ragflash.engine.cache import CacheTier
from ragflash.engine.request import ChatMessage, GenerateRequest, SegmentKind, Span, TextSegment
from ragflash.kvcache.allocator import PAGE_TOKENS, pages_for
from ragflash.sessions import FolderArchive, SessionFolder, SessionLimits

QUESTIONS = ("Which letter comes first?", "What is written about the sea?")
LARGE = os.environ.get("RAGFLASH_TEST_27B")


def ask(client, text, question, **options):
    segments = (
        TextSegment(SegmentKind.DOCUMENT, text, (Span("d", 0, 0, len(text)),)),
        TextSegment(SegmentKind.QUESTION, question),
    )
    rules = TextSegment(SegmentKind.RULES, "Answer from the document alone.")
    messages = (ChatMessage("system", (rules,)), ChatMessage("user", segments))
    request = GenerateRequest(question, messages, **options)
    return asyncio.run(client.complete(request))


def start(stack, model_path, files=None, **options):
    """Start an engine, over a folder of files or none, until the stack is left."""
    archive = None
    if files is not None:
        limits = SessionLimits(quota_bytes=64 << 30, min_free_bytes=0)
        folder = stack.enter_context(closing(SessionFolder.open(files, limits)))
        archive = stack.enter_context(closing(FolderArchive(folder)))
    return stack.enter_context(closing(start_engine(model_path, archive=archive, **options)))


def tell(warm, cold):
    rate = f"{warm.timings.restore_ms:.0f} ms at {warm.timings.restore_gb_s:.2f} GB/s"
    first = f"{warm.timings.ttft_ms:.0f} ms, computed {cold.timings.ttft_ms:.0f} ms"
    print(f"{warm.timings.cache_n} tokens: restored in {rate}; first token after {first}")


def test_a_restarted_engine_answers_from_files(smollm2_path, device, is_small, tmp_path):
    words = ["sea", "wave", "stone", "letter", "green", "seven"]
    text = " ".join(random.Random(1).choices(words, k=300 if is_small else 6000))
    options = {"device": device, "context_tokens": 8192, "max_slots": 2}
    options |= {} if is_small else {"kv_format": "tq3_0", "vram_bytes": 8 << 30}
    asked = {"max_tokens": 8 if is_small else 48, "logprobs": True}

    with ExitStack() as stack:
        client = start(stack, smollm2_path, **options)
        cold = [ask(client, text, one, cache=False, **asked) for one in QUESTIONS]
    with ExitStack() as stack:
        ask(start(stack, smollm2_path, tmp_path, **options), text, "What?", max_tokens=1)
    for at, one in enumerate(QUESTIONS):
        with ExitStack() as stack:
            client = start(stack, smollm2_path, tmp_path, **options)
            warm = ask(client, text, one, **asked)
            again = ask(client, text, one, **asked)
        assert (warm.tier, again.tier) == (CacheTier.FILE, CacheTier.DEVICE)
        assert warm.timings.prompt_n == again.timings.prompt_n < 40
        for found in (warm, again):
            assert found.token_ids == cold[at].token_ids
            assert found.logprobs == cold[at].logprobs
        tell(warm, cold[at])


@pytest.mark.skipif(LARGE is None, reason="RAGFLASH_TEST_27B names no file")
def test_a_long_document_of_a_large_model_outlives_the_engine(device, is_small, tmp_path):
    """Recurrent states, exact and packed pages of a whole card: a second engine computes none."""
    num_tokens = 700 if is_small else 138_696
    options = {"device": device, "max_slots": 1, "cache_dir": tmp_path}
    options |= {"context_tokens": pages_for(num_tokens + 512) * PAGE_TOKENS, "kv_format": "tq3_0"}
    options |= {} if is_small else {"vram_bytes": 24 << 30}
    files, found = tmp_path / "sessions", []
    text = ""
    for _ in range(2):
        with ExitStack() as stack:
            client = start(stack, Path(LARGE), files, **options)
            text = text or Filler(client).text(num_tokens, seed=1)
            found.append(ask(client, text, QUESTIONS[0], max_tokens=48))
            found.append(ask(client, text, QUESTIONS[0], max_tokens=48))
    cold, again, warm, warm_again = found
    assert [one.tier for one in found] == [
        *(CacheTier.NONE, CacheTier.DEVICE),
        *(CacheTier.FILE, CacheTier.DEVICE),
    ]
    assert cold.timings.forward_rows > num_tokens
    assert cold.token_ids
    for one in (again, warm, warm_again):
        assert one.token_ids == cold.token_ids
        assert one.usage.cached_tokens >= num_tokens
        assert one.timings.forward_rows < 40 + len(one.token_ids)
    tell(warm, cold)
