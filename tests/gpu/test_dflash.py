"""A DFlash 2 drafter of random weights drafts on a card as it does on a CPU, to its arithmetic."""

import asyncio
from contextlib import closing

import pytest
import torch

from ragflash.engine.build import start_engine
from ragflash.engine.request import (
    ChatMessage,
    DraftMode,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.engine.row_drafters import DrafterOptions
from ragflash.gguf.reader import GGUFFile
from ragflash.models.dflash import Candidates, DraftSequence, Target, load_drafter
from ragflash.models.dflash.device import DeviceDFlash, DeviceSequence
from ragflash.models.dflash.paged_ring import PagedRings
from ragflash.models.shapes import model_shape
from tests.gpu.conftest import find_model
from tests.gpu.test_mtp import write_model
from tests.models.toy_files import write_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 1024, 16, 4, 128, 2048, 512, 3
BLOCK, RANK, TOP_K, TAPS, WINDOW = 8, 64, 16, (1, 4), 256
METADATA = {
    "embedding_length": HIDDEN,
    "block_count": LAYERS,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": [True, True, False],
    "rope.freq_base": 1e7,
    "dflash.block_size": BLOCK,
    "dflash.mask_token_id": VOCAB - 1,
    "dflash.target_layer_ids": list(TAPS),
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
}
NEAR = 0.5  # nats between the likeliest token and another that may take its place
DOCUMENT = "The seals are replaced every year, and the pressure is kept at 16 bar. " * 40


def shapes(hidden: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a drafter for a target of some width."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    of_layer = {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, queries),
        "attn_q_norm.weight": (HEAD_DIM,),
        "attn_k_norm.weight": (HEAD_DIM,),
        "ffn_gate.weight": (FFN, hidden),
        "ffn_up.weight": (FFN, hidden),
        "ffn_down.weight": (hidden, FFN),
        "attn_conv_base": (2, 2, hidden),
        "attn_conv_proj.weight": (hidden // 4, hidden),
        "ffn_conv_base": (2, 2, hidden),
        "ffn_conv_proj.weight": (hidden // 4, hidden),
    }
    return {
        "fc.weight": (hidden, len(TAPS) * hidden),
        "hidden_norm.weight": (hidden,),
        "output_norm.weight": (hidden,),
        "selector_hidden.weight": (RANK, hidden),
        "selector_predecessor.weight": (vocab_size, RANK),
        "selector_successor.weight": (vocab_size, RANK),
        **{
            f"blk.{layer}.{name}": shape
            for layer in range(LAYERS)
            for name, shape in of_layer.items()
        },
    }


def random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


@pytest.fixture(scope="module")
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.fixture(scope="module")
def path(generator, tmp_path_factory):
    tensors = {name: random(shape, generator) for name, shape in shapes(HIDDEN, VOCAB).items()}
    folder = tmp_path_factory.mktemp("drafter")
    return write_gguf(folder / "d.gguf", "qwen35-dflash-draft", METADATA, tensors, quantized=True)


def target_on(device: str) -> Target:
    generator = torch.Generator().manual_seed(2)
    table, head = (random((VOCAB, HIDDEN), generator).to(device) for _ in range(2))
    return Target(
        num_layers=8,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        embed=lambda ids: table[ids] * 32,
        logits=lambda rows: rows.float() @ head.t(),
    )


def draft(path, device: str, num_tokens: int, **options) -> Candidates:
    model = load_drafter(path, target_on(device), device=device, **options)
    sequence = DraftSequence(model, ring_tokens=512)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(num_tokens, len(TAPS) * HIDDEN, generator=generator).to(device)
    for part in features.split(300):
        sequence.append(part)
    state = sequence.export()
    again = DraftSequence(model, ring_tokens=512)
    again.load(state)
    found = sequence.draft(7, num_tokens, BLOCK - 1)
    assert torch.equal(again.draft(7, num_tokens, BLOCK - 1).log_probs, found.log_probs)
    return found


@pytest.mark.parametrize("form", ["dense", "records"])
@pytest.mark.parametrize("num_tokens", [40, 700])
def test_candidates_are_as_near_as_the_arithmetic_allows(path, form, num_tokens, device):
    expected = draft(path, "cpu", num_tokens, dtype=torch.float32)
    found = draft(path, device, num_tokens, dtype=torch.bfloat16, form=form)
    off = (found.log_probs.cpu() - expected.log_probs).abs()
    alike = (found.token_ids[:, 0].cpu() == expected.token_ids[:, 0]).double().mean()
    print(f"{form}, {num_tokens} tokens: {off.max():.3f} {off.mean():.4f} {alike:.2f}")
    assert expected.log_probs.std() > 0.1
    assert off.mean() < 0.05
    assert alike > 0.7


@pytest.mark.parametrize("num_tokens", [40, 700])
def test_captured_passes_draft_what_the_layers_draft(path, num_tokens, device):
    """Few and many rows at a time, and a ring that wrapped."""
    model = load_drafter(
        path, target_on(device), device=device, dtype=torch.bfloat16, form="records"
    )
    where = torch.device(device)
    rings = PagedRings(model.config, max_slots=2, device=where, num_tokens=512)
    card = DeviceDFlash(
        model, where, max_slots=2, chunk_tokens=300, rings=rings,
        workspace=torch.empty(0, dtype=torch.bfloat16, device=where),
    )  # fmt: skip
    sequence, again = (DeviceSequence(card, lambda slot=slot: slot) for slot in (1, 0))
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(num_tokens, len(TAPS) * HIDDEN, generator=generator).to(device)
    for part in features.split([30, 3, 1, num_tokens - 34]):
        sequence.append(part)
    found = sequence.draft(7, num_tokens, BLOCK - 1, TOP_K)
    again.load(sequence.export())
    assert torch.equal(again.draft(7, num_tokens, BLOCK - 1, TOP_K).log_probs, found.log_probs)
    expected = draft(path, "cpu", num_tokens, dtype=torch.float32)
    off = (found.log_probs - expected.log_probs).abs()
    alike = (found.token_ids[:, 0] == expected.token_ids[:, 0]).double().mean()
    print(f"captured, {num_tokens} tokens: {off.max():.3f} {off.mean():.4f} {alike:.2f}")
    assert off.mean() < 0.05
    assert alike > 0.7


def write_for(target, path):
    """Write a random drafter with the block and heads of `METADATA` for another model."""
    with GGUFFile.open(target) as file:
        hidden, vocab_size = model_shape(file).hidden_size, model_shape(file).vocab_size
    generator = torch.Generator().manual_seed(4)
    of_drafter = shapes(hidden, vocab_size).items()
    tensors = {name: random(shape, generator) for name, shape in of_drafter}
    told = METADATA | {
        "embedding_length": hidden,
        "dflash.mask_token_id": vocab_size - 1,
        "dflash.target_layer_ids": [1, 2],
    }
    return write_gguf(path, "qwen35-dflash-draft", told, tensors, quantized=True)


def ask(client, draft, question="Copy the first sentence."):
    segments = (
        TextSegment(SegmentKind.DOCUMENT, DOCUMENT, (Span("manual", 0, 0, len(DOCUMENT)),)),
        TextSegment(SegmentKind.QUESTION, question),
    )
    request = GenerateRequest(
        f"{draft}", (ChatMessage("user", segments),), max_tokens=48, draft=draft, logprobs=True,
        top_logprobs=10,
    )  # fmt: skip
    return asyncio.run(client.complete(request))


def gap_of(plain, found) -> float:
    """Nats by which the first token that differs is less likely; 0 where none does."""
    pairs = zip(plain.token_ids, found.token_ids, strict=False)
    first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        return 0.0
    told = plain.logprobs[first]
    others = {one.token_id: one.logprob for one in told.top}
    return told.chosen.logprob - others.get(found.token_ids[first], float("-inf"))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "qwen35"])
def test_an_engine_writes_what_it_writes_without_drafts(
    name, exact, request, tmp_path, device, is_small
):
    """Chains bit for bit in exact mode; else, and in trees, up to near ties."""
    if is_small:
        pytest.skip("a CPU has no exact mode")
    target = find_model(name, request) if name == "smollm2" else write_model(tmp_path)
    given = DrafterOptions(file=write_for(target, tmp_path / "drafter.gguf"))
    with closing(
        start_engine(
            target, device=device, context_tokens=4096, max_slots=2, exact=exact,
            drafts=True, row_drafters=given,
        )
    ) as client:  # fmt: skip
        plain, chain, tree, auto = (
            ask(client, mode)
            for mode in (DraftMode.OFF, DraftMode.DFLASH, DraftMode.TREE, DraftMode.AUTO)
        )
    assert {count.source for count in chain.timings.drafts} == {"dflash"}
    assert "dflash" in {count.source for count in tree.timings.drafts}
    if exact:
        assert chain.token_ids == plain.token_ids
    gaps = [gap_of(plain, found) for found in (chain, tree, auto)]
    print(f"{name}, exact {exact}: gaps of chain, tree and auto {gaps}")
    assert max(gaps) < NEAR
