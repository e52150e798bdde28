"""The llama architecture on toy files: any way of feeding rows gives the same logits."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ragflash.errors import ArchitectureUnknown, GGUFInvalid, ModelError, TensorMissing
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.allocator import PageAllocator
from ragflash.kvcache.pages import KVLayout, KVPages, PagePool
from ragflash.kvcache.table import PageTable
from ragflash.models.contract import ForwardBatch, SequenceRows
from ragflash.models.llama import Llama
from ragflash.models.registry import load_model, model_class
from ragflash.models.weights import weight_format
from tests.tiny import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, VOCAB_SIZE, write_tiny_llama

NUM_PAGES = 40
TOLERANCE = 1e-4


def load(path, **options) -> Llama:
    with GGUFFile.open(path) as file:
        model = load_model(file, dtype="float32", **options)
    assert isinstance(model, Llama)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Llama:
    return load(write_tiny_llama(tmp_path_factory.mktemp("llama") / "tiny.gguf", seed=1))


def poisoned_pages(model: Llama) -> KVPages:
    pool = PagePool(model.kv_layout, NUM_PAGES)
    for page in range(NUM_PAGES):
        pool.page(page).fill_(float("nan"))
    return KVPages(pool)


def text(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


def forward(
    model: Llama,
    kv_pages: KVPages,
    parts: Sequence[tuple[list[int], int, tuple[int, ...]]],
    *,
    logit_rows: Sequence[tuple[int, ...]] | None = None,
) -> torch.Tensor:
    """Run `(tokens, committed, pages)` of several sequences in one call; all logits by default."""
    rows = tuple(
        SequenceRows(
            slot=slot,
            num_rows=len(tokens),
            committed=committed,
            pages=pages,
            logit_rows=tuple(range(len(tokens))) if logit_rows is None else logit_rows[slot],
        )
        for slot, (tokens, committed, pages) in enumerate(parts)
    )
    token_ids = [token for tokens, _, _ in parts for token in tokens]
    positions = [c + i for tokens, c, _ in parts for i in range(len(tokens))]
    batch = ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), rows)
    return model.forward(batch, kv_pages)


def one_pass(model: Llama, tokens: list[int]) -> torch.Tensor:
    return forward(model, poisoned_pages(model), [(tokens, 0, tuple(range(NUM_PAGES)))])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_says_what_it_is(model):
    assert (model.vocab_size, model.context_tokens) == (VOCAB_SIZE, 2048)
    layout = model.kv_layout
    assert layout == KVLayout.uniform(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, torch.float32)
    assert model.compute_dtype == torch.float32
    assert not model.is_recurrent
    model.commit(0, range(1))
    model.reset(0)
    assert model.snapshot(0) == ()
    model.restore(0, ())


@pytest.mark.parametrize("tied", [False, True])
def test_equals_transformers(tmp_path, tied):
    path = write_tiny_llama(tmp_path / "tiny.gguf", seed=2, tied=tied, quantized=True)
    from tests.golden.make_smollm2_goldens import load_transformers_llama

    tokens = text(300)
    with torch.no_grad():
        expected = load_transformers_llama(path)(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.5
    assert_close(one_pass(load(path), tokens), expected)


@pytest.mark.parametrize("chunk", [1, 37, 256, 300])
def test_chunks_equal_one_pass(model, chunk):
    tokens = text(560)
    kv_pages = poisoned_pages(model)
    pages = (5, 0, 9)
    logits = [
        forward(model, kv_pages, [(tokens[start : start + chunk], start, pages)])
        for start in range(0, len(tokens), chunk)
    ]
    assert_close(torch.cat(logits), one_pass(model, tokens))


def test_sequences_together_equal_each_alone(model):
    """A prefill, a decode step, and a draft, all in one call."""
    prompts = [text(290, seed=1), text(401, seed=2), text(30, seed=3)]
    starts, pages = [0, 400, 25], [(3, 7), (1, 6), (10,)]
    kv_pages = poisoned_pages(model)
    for prompt, start, table in zip(prompts[1:], starts[1:], pages[1:], strict=True):
        forward(model, kv_pages, [(prompt[:start], 0, table)])
    parts = [(p[s:], s, table) for p, s, table in zip(prompts, starts, pages, strict=True)]
    logits = forward(model, kv_pages, parts)
    alone = [one_pass(model, p)[s:] for p, s in zip(prompts, starts, strict=True)]
    assert_close(logits, torch.cat(alone))


def test_gives_the_logits_of_wanted_rows_only(model):
    tokens = text(20)
    whole = one_pass(model, tokens)
    parts = [(tokens, 0, (0,)), (tokens, 0, (1,)), (tokens, 0, (2,))]
    wanted = forward(model, poisoned_pages(model), parts, logit_rows=[(3, 19), (), (0,)])
    assert_close(wanted, whole[[3, 19, 0]])
    none = forward(model, poisoned_pages(model), parts, logit_rows=[(), (), ()])
    assert none.shape == (0, VOCAB_SIZE)
    assert none.dtype == torch.float32


def test_rows_that_were_not_committed_leave_no_trace(model):
    """A rejected draft is overwritten by what comes after the committed length."""
    tokens = text(280)
    kv_pages = poisoned_pages(model)
    forward(model, kv_pages, [(tokens[:250], 0, (4, 2))])
    forward(model, kv_pages, [(text(12, seed=9), 250, (4, 2))])
    logits = forward(model, kv_pages, [(tokens[250:], 250, (4, 2))])
    assert_close(logits, one_pass(model, tokens)[250:])


def test_forks_at_every_offset_equal_a_contiguous_run(model):
    """Forks copy the partial page and go on together, 16 in a call; one run goes on in place."""
    base, tail = text(512), text(4, seed=5)
    allocator = PageAllocator(NUM_PAGES)
    table = PageTable(allocator)
    table.reserve(len(base))
    kv_pages = poisoned_pages(model)
    forward(model, kv_pages, [(base, 0, table.pages)])
    table.advance(len(base))
    forked = {}
    for first in range(256, 512, 16):
        forks = [table.fork(length) for length in range(first, first + 16)]
        for fork, copies in forks:
            for copy in copies:
                kv_pages.exact.page(copy.dst).fill_(float("nan"))
            kv_pages.copy(copies)
            fork.reserve(len(tail))
        logits = forward(model, kv_pages, [(tail, fork.length, fork.pages) for fork, _ in forks])
        for (fork, _), found in zip(forks, logits.split(len(tail)), strict=True):
            forked[fork.length] = found
            fork.release()
    assert len(forked) == 256
    in_place = poisoned_pages(model)
    forward(model, in_place, [(base, 0, (0, 1))])
    for length in sorted(forked, reverse=True):  # what is overwritten is not needed again
        assert_close(forked[length], forward(model, in_place, [(tail, length, (0, 1, 2))]))


def test_frequency_divisors_stretch_positions(tmp_path):
    plain = load(write_tiny_llama(tmp_path / "plain.gguf", seed=3))
    scaled = load(write_tiny_llama(tmp_path / "scaled.gguf", seed=3, rope_freqs=True))
    tokens = text(40)
    assert (one_pass(plain, tokens) - one_pass(scaled, tokens)).abs().max() > 0.01
    (frequencies,) = plain.parts.frequencies
    halved = Llama(
        replace(plain.parts, frequencies=(frequencies / 2,)),
        vocab_size=VOCAB_SIZE,
        context_tokens=2048,
        kv_layout=plain.kv_layout,
    )
    rows = SequenceRows(0, 40, 0, (0,), tuple(range(40)))
    batch = ForwardBatch(torch.tensor(tokens), torch.arange(40), (rows,))
    stretched = replace(batch, positions=2 * batch.positions)
    assert_close(halved.forward(stretched, poisoned_pages(plain)), one_pass(plain, tokens))


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"rope.scaling.type": "yarn"}, ModelError, "'yarn' is not implemented"),
        ({"rope.scaling.type": "linear"}, ModelError, "'linear' is not implemented"),
        ({"rope.scale_linear": 2.0}, ModelError, "linear RoPE scaling"),
        ({"expert_count": 8}, ModelError, "experts"),
        ({"rope.dimension_count": 8}, ModelError, "rope.dimension_count = 8"),
        ({"attention.value_length": 8}, ModelError, "value_length = 8"),
        ({"attention.head_count_kv": 4}, GGUFInvalid, "does not divide"),
        ({"attention.head_count": 0}, GGUFInvalid, "not positive"),
        ({"block_count": "three"}, GGUFInvalid, "not a int"),
        ({"block_count": 4_000_000_000}, GGUFInvalid, "4000000000 blocks cannot be made of"),
        ({"block_count": 4}, TensorMissing, "blk.3.attn_norm"),
        ({"block_count": 2}, ModelError, "9 tensors"),
        ({"feed_forward_length": 64}, TensorMissing, "ffn_gate"),
        ({"embedding_length": 32}, TensorMissing, "token_embd"),
    ],
)
def test_refuses_files_it_would_compute_wrongly(tmp_path, overrides, error, words):
    path = write_tiny_llama(tmp_path / "odd.gguf", seed=4, overrides=overrides)
    with pytest.raises(error, match=words):
        load(path)


def test_refuses_tensors_that_it_would_ignore(tmp_path):
    path = write_tiny_llama(tmp_path / "b.gguf", seed=4, extra_tensors=("blk.0.attn_q.bias",))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        load(path)


def test_knows_the_architectures_of_its_table():
    assert model_class("llama") is Llama
    with pytest.raises(ArchitectureUnknown, match=r"'mamba'; ragflash runs: .*llama"):
        model_class("mamba")


@pytest.mark.parametrize(("quantized", "name"), [(True, "Q8_0"), (False, "F32")])
def test_names_the_format_of_most_weights(tmp_path, quantized, name):
    path = write_tiny_llama(tmp_path / "tiny.gguf", seed=5, quantized=quantized)
    with GGUFFile.open(path) as file:
        assert weight_format(file) == name


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2 avx512_bf16", torch.bfloat16),
        ("amx_bf16", torch.bfloat16),
        ("avx2", torch.float32),
    ],
)
def test_auto_is_bfloat16_only_where_hardware_multiplies_it(tmp_path, monkeypatch, flags, dtype):
    monkeypatch.setattr("ragflash.models.registry._cpu_flags", lambda: frozenset(flags.split()))
    path = write_tiny_llama(tmp_path / "tiny.gguf", seed=5)
    with GGUFFile.open(path) as file:
        model = load_model(file)
    assert model.compute_dtype == model.kv_layout.dtype == dtype


def test_bfloat16_stays_near_float32(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", seed=6)
    tokens = text(100)
    with GGUFFile.open(path) as file:
        rounded = load_model(file, dtype="bfloat16")
    exact = one_pass(load(path), tokens)
    found = one_pass(rounded, tokens)
    assert found.dtype == torch.float32
    assert (found - exact).abs().mean() < 0.05 * exact.std()
