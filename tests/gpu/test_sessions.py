"""What a card has read comes back from files and answers bit for bit as it did."""

import asyncio
import random
from contextlib import ExitStack, closing

from ragflash.engine.build import start_engine
from ragflash.engine.cache import CacheTier
from ragflash.engine.request import ChatMessage, GenerateRequest, SegmentKind, Span, TextSegment
from ragflash.sessions import FolderArchive, SessionFolder, SessionLimits

QUESTIONS = ("Which letter comes first?", "What is written about the sea?")


def ask(client, text, question, **options):
    segments = (
        TextSegment(SegmentKind.DOCUMENT, text, (Span("d", 0, 0, len(text)),)),
        TextSegment(SegmentKind.QUESTION, question),
    )
    rules = TextSegment(SegmentKind.RULES, "Answer from the document alone.")
    messages = (ChatMessage("system", (rules,)), ChatMessage("user", segments))
    request = GenerateRequest(question, messages, logprobs=True, **options)
    return asyncio.run(client.complete(request))


def test_a_restarted_engine_answers_from_files(smollm2_path, device, is_small, tmp_path):
    words = ["sea", "wave", "stone", "letter", "green", "seven"]
    text = " ".join(random.Random(1).choices(words, k=300 if is_small else 6000))
    options = {} if is_small else {"kv_format": "tq3_0", "vram_bytes": 8 << 30}
    max_tokens = 8 if is_small else 48

    def start(stack, archive=None):
        sizes = {"context_tokens": 8192, "max_slots": 2, **options}
        client = start_engine(smollm2_path, device=device, archive=archive, **sizes)
        return stack.enter_context(closing(client))

    def start_on_files(stack):
        folder = SessionFolder.open(tmp_path, SessionLimits(quota_bytes=8 << 30, min_free_bytes=0))
        archive = FolderArchive(folder)
        stack.callback(folder.close)
        stack.callback(archive.close)
        return start(stack, archive)

    with ExitStack() as stack:
        client = start(stack)
        cold = [ask(client, text, one, max_tokens=max_tokens, cache=False) for one in QUESTIONS]
    with ExitStack() as stack:
        ask(start_on_files(stack), text, "What?", max_tokens=1)
    for at, one in enumerate(QUESTIONS):
        with ExitStack() as stack:
            client = start_on_files(stack)
            warm = ask(client, text, one, max_tokens=max_tokens)
            again = ask(client, text, one, max_tokens=max_tokens)
        assert (warm.tier, again.tier) == (CacheTier.FILE, CacheTier.DEVICE)
        assert warm.timings.prompt_n == again.timings.prompt_n < 40
        for found in (warm, again):
            assert found.token_ids == cold[at].token_ids
            assert found.logprobs == cold[at].logprobs
        rate = f"{warm.timings.restore_ms:.0f} ms at {warm.timings.restore_gb_s:.2f} GB/s"
        first = f"{warm.timings.ttft_ms:.0f} ms, computed {cold[at].timings.ttft_ms:.0f} ms"
        print(f"{warm.timings.cache_n} tokens: restored in {rate}; first token after {first}")
