"""A qwen35 model with a block of multi-token prediction, of random weights, drafts on a card."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ragflash.engine.build import start_engine
from ragflash.engine.client import EngineClient
from ragflash.engine.request import (
    ChatMessage,
    DraftMode,
    Finished,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.models.contract import SequenceRows
from ragflash.models.mtp import MAX_DEPTH
from tests.models.forwards import PAGES, batch_of
from tests.models.mtp_blocks import (
    Blocks,
    Text,
    absorb,
    assert_likely,
    fill_packed,
    make_blocks,
)
from tests.models.programmes import assert_near
from tests.models.toy_files import TOKENS, write_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 1024, 4, 2, 256, 2048, 4
KEY_HEADS, VALUE_HEADS, STATE = 4, 8, 128
INNER, CHANNELS = VALUE_HEADS * STATE, (2 * KEY_HEADS + VALUE_HEADS) * STATE
METADATA = {
    "context_length": 8192,
    "embedding_length": HIDDEN,
    "block_count": LAYERS + 1,
    "nextn_predict_layers": 1,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "full_attention_interval": LAYERS,
    "rope.dimension_count": 64,
    "rope.freq_base": 1e7,
    "ssm.conv_kernel": 4,
    "ssm.group_count": KEY_HEADS,
    "ssm.inner_size": INNER,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": VALUE_HEADS,
}
NORMS = {"attn_norm.weight": (HIDDEN,), "post_attention_norm.weight": (HIDDEN,)}
FEED_FORWARD = {
    "ffn_gate.weight": (FFN, HIDDEN),
    "ffn_up.weight": (FFN, HIDDEN),
    "ffn_down.weight": (HIDDEN, FFN),
}
ATTENTION = {
    "attn_q.weight": (2 * HEADS * HEAD_DIM, HIDDEN),
    "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "attn_q_norm.weight": (HEAD_DIM,),
    "attn_k_norm.weight": (HEAD_DIM,),
}
DELTANET = {
    "attn_qkv.weight": (CHANNELS, HIDDEN),
    "attn_gate.weight": (INNER, HIDDEN),
    "ssm_beta.weight": (VALUE_HEADS, HIDDEN),
    "ssm_alpha.weight": (VALUE_HEADS, HIDDEN),
    "ssm_conv1d.weight": (CHANNELS, 4),
    "ssm_a": (VALUE_HEADS,),
    "ssm_dt.bias": (VALUE_HEADS,),
    "ssm_norm.weight": (STATE,),
    "ssm_out.weight": (HIDDEN, INNER),
}
NEXTN = {
    "nextn.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    "nextn.enorm.weight": (HIDDEN,),
    "nextn.hnorm.weight": (HIDDEN,),
    "nextn.shared_head_norm.weight": (HIDDEN,),
}
TEXT = Text.random(300, len(TOKENS), HIDDEN)


def write_model(folder: Path) -> Path:
    """Write a model with random weights and a block."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    mixers = [DELTANET] * (LAYERS - 1) + [ATTENTION, {**ATTENTION, **NEXTN}]
    for layer, mixer in enumerate(mixers):
        parts = {**NORMS, **mixer, **FEED_FORWARD}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    tensors = {
        name: torch.rand(shape, generator=generator) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    for name, values in tensors.items():
        if name.endswith("ssm_a"):
            values.neg_()  # a decay
    return write_gguf(
        folder / "toy.gguf", "qwen35", METADATA, tensors, quantized=True, tokenizer=True
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def blocks(path, device) -> Blocks:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return make_blocks(path, torch.device(device), dtype)


@pytest.mark.parametrize("chunks", [(290,), (40, 1, 32, 21, 8)])
def test_rows_of_the_stream_are_those_of_the_layers(blocks, chunks):
    start = 0
    for runs in (blocks.model, blocks.card):
        runs.reset(0)
    for size in chunks:
        batch = batch_of(TEXT.token_ids[start : start + size], start)
        expected = blocks.model.forward_tapped(batch, blocks.layer_pages, (1,))
        found = blocks.card.forward_tapped(batch, blocks.pages, (1,))
        for kept, layers in ((found.taps, expected.taps), (found.stream, expected.stream)):
            first = int(start == 0)  # of which a delta rule remembers nothing but itself
            assert_near(kept.float().cpu()[first:], layers[first:], 0.1)
        blocks.model.commit(0, range(size))
        blocks.card.commit(0, range(size))
        start += size


@pytest.mark.parametrize("chunks", [(290,), (7, 32, 1, 21, 40)])
def test_keys_and_values_are_those_of_the_layers(blocks, chunks):
    absorb(blocks.layers, TEXT, chunks)
    absorb(blocks.fused, TEXT, chunks)
    end = min(sum(chunks), 256)
    for kind in ("keys", "values"):
        expected, found = (
            getattr(pages.exact, kind)(blocks.layer)[PAGES[0], :, :end].float().cpu()
            for pages in (blocks.layer_pages, blocks.pages)
        )
        assert_near(found, expected, 0.05)


@pytest.mark.parametrize("num_packed", [0, 1])
@pytest.mark.parametrize("depth", range(1, MAX_DEPTH + 1))
def test_drafts_are_those_of_the_layers(blocks, num_packed, depth):
    """Over the end of a page, and behind a packed one."""
    fill_packed(blocks, source=3, packed=2)
    rows = SequenceRows(0, depth, 254, PAGES, ())
    if num_packed:
        rows = SequenceRows(0, depth, 530, (0, 1), (), packed_pages=(2,))
    stream, token_id = TEXT.stream[:1], TEXT.token_ids[0]
    drafted = blocks.fused.draft(stream.to(blocks.fused.nothing), token_id, rows)
    assert_likely(blocks, stream, token_id, rows, drafted)


def test_answers_are_the_same_with_drafts(path, device, is_small):
    """In exact mode, behind a document of several chunks, which is stored for the second."""
    options = {"context_tokens": 4096, "kv_format": "q8_0", "max_slots": 2, "drafts": True}
    options |= {"dtype": "float32"} if device == "cpu" else {"exact": True}
    document = "Seals are replaced every year; the pressure is 16 bar. " * (4 if is_small else 50)
    max_tokens = 8 if is_small else 40
    with closing(start_engine(path, device=device, **options)) as client:
        for question in ("What?", "How often?"):
            plain, found = (
                ask(client, document, question, draft=draft, max_tokens=max_tokens)
                for draft in (DraftMode.OFF, DraftMode.MTP)
            )
            assert found.token_ids == plain.token_ids
            assert {count.source for count in found.timings.drafts} == {"mtp"}
            print(found.timings.drafts)


def ask(client: EngineClient, document: str, question: str, **options) -> Finished:
    segments = (
        TextSegment(SegmentKind.DOCUMENT, document, (Span("manual", 0, 0, len(document)),)),
        TextSegment(SegmentKind.QUESTION, question),
    )
    request = GenerateRequest("r", (ChatMessage("user", segments),), **options)
    return asyncio.run(client.complete(request))
