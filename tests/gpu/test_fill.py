"""A long context is really filled on a card of 24 GB, and nothing is allocated on the way."""

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ragflash.bench.gpu import peak_bytes
from ragflash.bench.gpu_session import Session, Sizes
from ragflash.bench.stub_drafter import DrafterSlot, StubDrafter
from ragflash.engine.build import start_engine

CARD_BYTES = 24 << 30
TOKENS = 138_696
MOST_BYTES = 23.5e9
COUNTERS = ("num_device_alloc", "reserved_bytes.all.current")


def fill(path, *, device, context_tokens, vram_bytes, num_tokens):
    """Read a prompt and decode behind it, twice; return both ends, and the allocator's counters."""
    slot = DrafterSlot()
    client = start_engine(
        path,
        device=device,
        vram_bytes=vram_bytes,
        context_tokens=context_tokens,
        kv_format="tq3_0",
        max_slots=1,
        drafter_factory=slot,
    )
    with closing(client):
        session = Session(client, slot, Sizes())
        counters, ends = [], []
        for tokens in (min(3000, num_tokens), num_tokens):
            question = session.filler.question_for("", tokens, seed=1)
            drafter = StubDrafter([0] * 256, tokens, 20)
            ends.append(session.ask(question, 64, drafter=drafter)[0])
            stats = torch.cuda.memory_stats() if device == "cuda" else {}
            counters.append([stats.get(name) for name in COUNTERS])
        peak = peak_bytes() if device == "cuda" else 0.0
    return ends, counters, peak


def test_a_small_model_fills_its_context_without_an_allocation(smollm2_path, device, is_small):
    tokens = 700 if is_small else 8000
    ends, counters, _ = fill(
        smollm2_path,
        device=device,
        context_tokens=1024 if is_small else 8192,
        vram_bytes=4 << 30,
        num_tokens=tokens,
    )
    assert abs(ends[-1].usage.prompt_tokens - tokens) < 80
    assert len(ends[-1].token_ids) > 1
    assert counters[0] == counters[1]


def test_138696_tokens_fit_a_card_of_24_gb(device):
    path = os.environ.get("RAGFLASH_TEST_27B")
    if path is None:
        pytest.skip("RAGFLASH_TEST_27B names no file; `ragflash bench make-model` writes one")
    ends, counters, peak = fill(
        Path(path),
        device=device,
        context_tokens=139_264,
        vram_bytes=CARD_BYTES,
        num_tokens=TOKENS,
    )
    print(f"{peak / 1e9:.2f} GB, first token after {ends[-1].timings.ttft_ms / 1000:.1f} s")
    assert abs(ends[-1].usage.prompt_tokens - TOKENS) <= 16
    assert len(ends[-1].token_ids) == 64
    assert counters[0] == counters[1]
    assert peak <= MOST_BYTES
