"""Every architecture gives the logits that transformers gives, however its rows are fed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from ragflash.kvcache.pages import PagePool
from ragflash.models.contract import ForwardBatch, Model, SequenceRows
from ragflash.models.moe import Experts
from tests.models.families import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE, Tensors, tile
from tests.models.forwards import PAGES, Tree, batch_of, keep_path, load, poisoned_pages, run
from tests.models.goldens import load_golden
from tests.models.toy_files import TOKENS, write_gguf

TOLERANCE = 1e-4
TEXT = random.Random(0).choices(range(VOCAB_SIZE), k=330)
HYBRIDS = [name for name in FAMILIES if name.startswith("qwen35")]


@dataclass(frozen=True)
class Oracle:
    """A family's toy file, and the logits of `TEXT` by transformers, float64 where it can."""

    metadata: dict
    tensors: Tensors
    model: Model
    logits: torch.Tensor


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def oracle(name: str) -> Oracle:
        if name not in made:
            family = FAMILIES[name]
            reference = family.build(seed=1)
            tensors = family.tensors(reference)
            path = tmp_path_factory.mktemp(name) / "toy.gguf"
            write_gguf(path, family.architecture, family.metadata, tensors)
            with torch.inference_mode():
                logits = reference.double()(torch.tensor([TEXT])).logits[0].float()
            made[name] = Oracle(dict(family.metadata), tensors, load(path), logits)
        return made[name]

    return oracle


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers(oracles, name):
    oracle = oracles(name)
    assert oracle.logits.std() > 0.5
    assert_close(run(oracle.model, TEXT, []), oracle.logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_llama_cpp(tmp_path, name):
    """Its own arithmetic is rougher: it keeps keys and values in f16."""
    golden, family = load_golden("llama_cpp.json")["toys"][name], FAMILIES[name]
    tensors = family.tensors(family.build(seed=1, vocab_size=len(TOKENS)))
    path = write_gguf(tmp_path / "toy.gguf", family.architecture, family.metadata, tensors)
    logits = run(load(path), golden["ids"], [])
    top_ids = torch.tensor(golden["top_ids"])
    assert (logits.argmax(-1) == top_ids[:, 0]).float().mean() > 0.99
    expected = torch.tensor(golden["top_logits"])
    torch.testing.assert_close(logits.gather(1, top_ids), expected, rtol=0, atol=6e-3)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_of_any_size_equal_transformers(oracles, name, size):
    """Decoding is a chunk of one row."""
    oracle = oracles(name)
    text = TEXT[:80] if size == 1 else TEXT
    found = run(oracle.model, text, [size] * (len(text) // size))
    assert_close(found, oracle.logits[: len(text)])


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_together_equal_each_alone(oracles, name):
    """A prefill and a decode step in one call, in slots of their own."""
    oracle, tokens = oracles(name), TEXT[:100]
    model = oracle.model
    pages = poisoned_pages(model)
    for slot in (0, 5):
        model.reset(slot)
    model.forward(replace_pages(batch_of(tokens[:70], 0, slot=5), (2,)), pages)
    model.commit(5, range(70))
    rows = (
        SequenceRows(0, 100, 0, (1,), tuple(range(100))),
        SequenceRows(5, 1, 70, (2,), (0,)),
    )
    ids, positions = torch.tensor([*tokens, tokens[70]]), torch.tensor([*range(100), 70])
    found = model.forward(ForwardBatch(ids, positions, rows), pages)
    assert_close(found, oracle.logits[[*range(100), 70]])


def replace_pages(batch: ForwardBatch, pages: tuple[int, ...]) -> ForwardBatch:
    return replace(batch, sequences=tuple(replace(s, pages=pages) for s in batch.sequences))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("accepted", [0, 1, 4, 7])
def test_drafts_count_as_far_as_they_are_committed(oracles, name, accepted):
    """Two pending rows and seven drafted ones, the first `accepted` of them right."""
    oracle = oracles(name)
    model, pages = oracle.model, poisoned_pages(oracle.model)
    model.reset(0)
    model.forward(batch_of(TEXT[:61], 0), pages)
    model.commit(0, range(61))
    right = TEXT[61 : 63 + accepted]
    wrong = [(token + 1) % VOCAB_SIZE for token in TEXT[63 + accepted : 70]]
    found = model.forward(batch_of(right + wrong, 61, num_draft=7), pages)
    assert_close(found[: len(right)], oracle.logits[61 : 61 + len(right)])
    model.commit(0, range(len(right)))
    after = 61 + len(right)
    found = model.forward(batch_of(TEXT[after : after + 20], after), pages)
    assert_close(found, oracle.logits[after : after + 20])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_branches_of_a_tree_are_texts_of_their_own(oracles, name, seed):
    """Over an edge of a page, and deeper than the windows of the toys.

    A path of any length is then kept; what it leaves is what the text alone leaves.
    """
    model, tree = oracles(name).model, Tree.random(seed, VOCAB_SIZE, num_certain=2, num_draft=28)
    start, after = TEXT[:245], TEXT[250:270]
    leaves = tree.leaves()
    expected = [run(model, start + tree.text(tree.path(leaf)), [245])[245:] for leaf in leaves]
    pages = poisoned_pages(model)
    model.reset(5)
    model.forward(batch_of(start, 0, slot=5), pages)
    model.commit(5, range(245))
    batch = batch_of(tree.token_ids, 245, slot=5, num_draft=tree.num_draft, parents=tree.parents)
    found = model.forward(batch, pages)
    for leaf, logits in zip(leaves, expected, strict=True):
        assert_close(found[tree.path(leaf)], logits)
    path = tree.path(leaves[-1])
    path = path[: len(path) - seed % 2]
    assert path != [*range(len(path))]
    keep_path(model, pages, 245, path, slot=5)
    alone = start + tree.text(path)
    expected_after = run(model, alone + after, [len(alone)])[len(alone) :]
    assert_close(model.forward(batch_of(after, len(alone), slot=5), pages), expected_after)
    run(model, alone, [245, 1])
    for kept, state in zip(model.snapshot(5), model.snapshot(0), strict=True):
        torch.testing.assert_close(kept, state, rtol=1e-5, atol=1e-5 * state.abs().max())


@pytest.mark.parametrize("name", HYBRIDS)
def test_state_is_the_same_however_rows_were_fed(oracles, name):
    """Before and after every edge of a chunk and of a page."""
    model = oracles(name).model
    for length in (2, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        run(model, TEXT[:length], [])
        expected = model.snapshot(0)
        run(model, TEXT[:length], [length - 1])
        for found, state in zip(model.snapshot(0), expected, strict=True):
            torch.testing.assert_close(found, state, rtol=1e-5, atol=1e-5 * state.abs().max())


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_snapshot_outlives_what_its_slot_does_next(oracles, name):
    oracle = oracles(name)
    model = oracle.model
    assert model.is_recurrent
    pages = poisoned_pages(model)
    model.reset(0)
    model.forward(batch_of(TEXT[:100], 0), pages)
    model.commit(0, range(100))
    kept = model.snapshot(0)
    copies = [state.clone() for state in kept]
    for _ in range(2):
        model.restore(3, kept)
        found = model.forward(batch_of(TEXT[100:140], 100, slot=3), pages)
        assert_close(found, oracle.logits[100:140])
        model.commit(3, range(40))
    for state, copy in zip(kept, copies, strict=True):
        assert torch.equal(state, copy)


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_that_are_not_committed_change_no_state(oracles, name):
    model = oracles(name).model
    pages = poisoned_pages(model)
    model.reset(0)
    model.forward(batch_of(TEXT[:50], 0), pages)
    model.commit(0, range(50))
    before = model.snapshot(0)
    model.forward(batch_of(TEXT[50:90], 50), pages)
    for found, state in zip(model.snapshot(0), before, strict=True):
        assert torch.equal(found, state)
    with pytest.raises(ValueError, match="30 of 40 rows"):
        model.commit(0, range(30))


@pytest.mark.parametrize("name", FAMILIES)
def test_quantised_files_equal_their_unpacked_weights(oracles, tmp_path, name):
    from gguf import GGMLQuantizationType, quants

    oracle, family = oracles(name), FAMILIES[name]
    packed = write_gguf(
        tmp_path / "packed.gguf",
        family.architecture,
        family.metadata,
        oracle.tensors,
        quantized=True,
    )
    rounded = dict(oracle.tensors)
    for key, values in rounded.items():
        if values.dim() >= 2 and values.shape[-1] % 32 == 0:
            blocks = quants.quantize(values.numpy(), GGMLQuantizationType.Q8_0)
            unpacked = quants.dequantize(blocks, GGMLQuantizationType.Q8_0)
            rounded[key] = torch.from_numpy(unpacked)
    unpacked_path = write_gguf(
        tmp_path / "unpacked.gguf", family.architecture, family.metadata, rounded
    )
    assert_close(run(load(packed), TEXT[:70], []), run(load(unpacked_path), TEXT[:70], []))


Mistake = Callable[[Tensors, dict], None]


def change(part: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
    """Change every tensor whose name ends with `part`."""

    def apply(tensors: Tensors, metadata: dict) -> None:
        names = [name for name in tensors if name.endswith(part)]
        assert names
        for name in names:
            tensors[name] = how(tensors[name])

    return apply


def say(**values: object) -> Mistake:
    """Change metadata; `None` removes a key, `__` stands for a dot."""

    def apply(tensors: Tensors, metadata: dict) -> None:
        for key, value in values.items():
            metadata.pop(key.replace("__", "."))
            if value is not None:
                metadata[key.replace("__", ".")] = value

    return apply


def drop(part: str) -> Mistake:
    def apply(tensors: Tensors, metadata: dict) -> None:
        names = [name for name in tensors if name.endswith(part)]
        assert names
        for name in names:
            del tensors[name]

    return apply


def swap_halves(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(4, 2, 32, -1).flip(1).reshape(rows.shape)


def untile(rows: torch.Tensor) -> torch.Tensor:
    """Back to the order in which three value heads of one key head stand together."""
    return rows.reshape(3, 2, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def other_pairs(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, 16, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


# What a wrong loader would compute of a right file, the right loader computes of these files.
MISTAKES: dict[str, tuple[str, Mistake]] = {
    "value heads grouped, not tiled": ("qwen35", change("attn_gate.weight", untile)),
    "value heads tiled twice": ("qwen35", change("ssm_beta.weight", lambda x: tile(x, 1))),
    "gate and query swapped": ("qwen35", change("attn_q.weight", swap_halves)),
    "norms one too small": ("qwen35", change("attn_norm.weight", lambda x: x - 1)),
    "head norms one too small": ("gemma3", change("attn_q_norm.weight", lambda x: x - 1)),
    "a norm one too large": ("llama", change("ffn_norm.weight", lambda x: x + 1)),
    "the gated norm folded too": ("qwen35", change("ssm_norm.weight", lambda x: x + 1)),
    "neighbours not paired": ("llama", change("attn_q.weight", other_pairs)),
    "neighbours paired": ("qwen3", change("attn_k.weight", other_pairs)),
    "all dimensions rotated": ("qwen35", say(rope__dimension_count=32)),
    "another base of rotation": ("qwen2", say(rope__freq_base=500_000.0)),
    "local base for all": ("gemma3", say(rope__freq_base=10_000.0)),
    "positions not divided": ("gemma3", say(rope__scaling__factor=1.0)),
    "window one too wide": ("gemma3", say(attention__sliding_window=17)),
    "window one too narrow": ("gemma4", say(attention__sliding_window=15)),
    "no soft cap": ("gemma4", say(final_logit_softcapping=None)),
    "no factor of a layer": ("gemma4", drop("layer_output_scale.weight")),
    "all pairs rotated in layers that see all": ("gemma4", drop("rope_freqs.weight")),
    "biases at half": ("qwen2", change("attn_q.bias", lambda x: x / 2)),
    "decay of the wrong sign": ("qwen35", change("ssm_a", lambda x: -x)),
    "decay not exponentiated": ("qwen35", change("ssm_a", lambda x: -(-x).log())),
    "decay without its bias": ("qwen35", change("ssm_dt.bias", torch.zeros_like)),
    "convolution back to front": ("qwen35", change("ssm_conv1d.weight", lambda x: x.flip(1))),
    "one expert instead of two": ("qwen35moe", say(expert_used_count=1)),
    "the shared expert at full measure": (
        "qwen35moe",
        change("ffn_gate_inp_shexp.weight", torch.zeros_like),
    ),
    "vectors of layers left out": (
        "gemma4-small",
        change("per_layer_token_embd.weight", torch.zeros_like),
    ),
    "keys of a layer not shared": ("gemma4-small", say(attention__shared_kv_layers=1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(oracles, tmp_path, mistake):
    name, apply = MISTAKES[mistake]
    oracle, family = oracles(name), FAMILIES[name]
    tensors, metadata = dict(oracle.tensors), dict(oracle.metadata)
    apply(tensors, metadata)
    if mistake == "keys of a layer not shared":  # the layer then needs some of its own
        for part in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            tensors[f"blk.5.{part}"] = tensors[f"blk.3.{part}"]
    path = write_gguf(tmp_path / "wrong.gguf", family.architecture, metadata, tensors)
    assert_far(run(load(path), TEXT[:70], []), oracle.logits[:70])


def assert_far(found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (found - expected).abs().max().nan_to_num(torch.inf)
    assert difference > 100 * TOLERANCE


def test_an_unscaled_embedding_shows(oracles):
    oracle = oracles("gemma3")
    model = oracle.model
    kept = model.parts
    assert kept.embedding_scale == HIDDEN_SIZE**0.5
    model.parts = replace(kept, embedding_scale=1.0)
    try:
        assert_far(run(model, TEXT[:70], []), oracle.logits[:70])
    finally:
        model.parts = kept


def test_shares_of_experts_that_do_not_add_up_show(oracles, monkeypatch):
    oracle = oracles("qwen35moe")

    def without_renormalising(self: Experts, h: torch.Tensor):
        return self.router(h).float().softmax(dim=-1).topk(self.num_used, dim=-1)

    monkeypatch.setattr(Experts, "route", without_renormalising)
    assert_far(run(oracle.model, TEXT[:70], []), oracle.logits[:70])


def test_pages_are_shared_out_by_layer(oracles):
    """Layers with windows and layers without have keys of other shapes; some have none."""
    layout = oracles("gemma4").model.kv_layout
    assert [(x.num_kv_heads, x.head_dim) for x in layout.layers] == [
        (1, 64) if layer in {4, 6} else (2, 32) for layer in range(7)
    ]
    small = oracles("gemma4-small").model.kv_layout
    assert len(small.layers) == 5
    assert len(oracles("qwen35").model.kv_layout.layers) == 1
    assert PagePool(layout, len(PAGES)).nbytes == len(PAGES) * layout.page_bytes
