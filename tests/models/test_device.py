"""A model's programme for a card, by its plain forms, against the layers that it was made from."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from ragflash.errors import ModelError
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.allocator import PageAllocator, PageForm
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.pages import KVPages, PackedPool, PagePool
from ragflash.models.contract import ForwardBatch, Model, SequenceRows
from ragflash.models.device.graphs import StepKind, step_kinds
from ragflash.models.device.lowering import lower
from ragflash.models.device.model import DeviceModel
from ragflash.models.registry import load_records
from tests.models.families import FAMILIES, VOCAB_SIZE
from tests.models.forwards import Tree, batch_of, keep_path, run
from tests.models.programmes import CPU, LOWERED, Pair, assert_near, feed, make_pair
from tests.models.toy_files import write_gguf

TEXT = random.Random(3).choices(range(VOCAB_SIZE), k=300)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Callable[[str], Pair]:
    return cache(lambda name: make_pair(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", LOWERED)
def test_many_rows_give_what_the_layers_give(pairs, name):
    """But for the head, whose rows are on the grid, and keys and values in float16.

    The first row of a delta rule remembers one row only; its norm magnifies any difference.
    """
    pair = pairs(name)
    expected = run(pair.layers, TEXT, [])
    assert_near(feed(pair, TEXT, [])[1:], expected[1:], 0.015)
    assert_near(feed(pair, TEXT, [100, 57])[1:], expected[1:], 0.015)


@pytest.mark.parametrize("name", LOWERED)
def test_few_rows_are_near_the_layers(pairs, name):
    pair, text = pairs(name), TEXT[:60]
    expected = run(pair.layers, text, [])
    found = feed(pair, text, [32, 20, 1, 7])
    share = 0.12 if pair.programme.is_recurrent else 0.03
    assert_near(found[8:], expected[8:], share)


@pytest.mark.parametrize("name", LOWERED)
def test_few_rows_are_the_same_in_any_chunks(pairs, name):
    pair, text = pairs(name), TEXT[:60]
    expected = feed(pair, text, [32, 20, 1, 7])
    assert_near(feed(pair, text, [1] * 9 + [30, 3]), expected, 0.01)
    assert_near(feed(pair, text, [5, 31, 1]), expected, 0.01)


@pytest.mark.parametrize("name", LOWERED)
@pytest.mark.parametrize("accepted", [0, 1, 4, 7])
def test_drafts_count_as_far_as_they_are_committed(pairs, name, accepted):
    """Two pending rows and seven drafted ones, the first `accepted` of them right."""
    pair = pairs(name)
    expected = feed(pair, TEXT[:90], [61])
    feed(pair, TEXT[:61], [61])
    right = TEXT[61 : 63 + accepted]
    wrong = [(token + 1) % VOCAB_SIZE for token in TEXT[63 + accepted : 70]]
    programme, pages = pair.programme, pair.pages
    programme.forward(batch_of(right + wrong, 61, num_draft=7), pages)
    programme.commit(0, range(len(right)))
    after = 61 + len(right)
    found = programme.forward(batch_of(TEXT[after:90], after), pages)
    assert_near(found, expected[after:90], 0.03)


@pytest.mark.parametrize("name", LOWERED)
@pytest.mark.parametrize("seed", range(3))
def test_a_path_of_a_tree_is_computed_and_kept_as_a_chain(pairs, name, seed):
    """Two pending rows and a tree, deeper than the windows of the toys."""
    pair, after = pairs(name), TEXT[100:120]
    programme, pages = pair.programme, pair.pages
    tree = Tree.random(seed, VOCAB_SIZE, num_certain=2, num_draft=28)
    leaves = tree.leaves()
    for leaf in (leaves[0], leaves[len(leaves) // 2], leaves[-1]):
        path = tree.path(leaf)
        text = TEXT[:61] + tree.text(path)
        expected = feed(pair, text + after, [61, len(path)])[61:]
        feed(pair, TEXT[:61], [61])
        batch = batch_of(tree.token_ids, 61, num_draft=tree.num_draft, parents=tree.parents)
        found = programme.forward(batch, pages)[path].clone()
        assert_near(found, expected[: len(path)], 0.03)
        keep_path(programme, pages, 61, path, slot=0)
        rest = programme.forward(batch_of(after, len(text)), pages)
        assert_near(rest, expected[len(path) :], 0.03)
        programme.commit(0, range(len(after)))


def test_a_tree_of_more_rows_than_a_step_has_is_refused(pairs):
    pair = pairs("qwen3")
    tree = Tree.random(2, VOCAB_SIZE, num_certain=20, num_draft=20)
    batch = batch_of(tree.token_ids, 0, num_draft=tree.num_draft, parents=tree.parents)
    with pytest.raises(ModelError, match="32 are the most"):
        pair.programme.forward(batch, pair.pages)


@pytest.mark.parametrize("name", LOWERED)
def test_a_snapshot_outlives_what_its_slot_does_next(pairs, name):
    pair = pairs(name)
    programme, pages = pair.programme, pair.pages
    expected = feed(pair, TEXT[:80], [60])[60:]
    feed(pair, TEXT[:60], [60])
    state = programme.snapshot(0)
    programme.forward(batch_of(TEXT[100:120], 60), pages)
    programme.commit(0, range(20))
    programme.restore(2, state)
    found = programme.forward(batch_of(TEXT[60:80], 60, slot=2), pages)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", LOWERED)
def test_sequences_together_equal_each_alone(pairs, name):
    """A chunk of many rows, a decode step and a draft in one forward, in slots of their own."""
    pair = pairs(name)
    programme, pages = pair.programme, pair.pages
    alone = feed(pair, TEXT[:75], [70, 1])[70:]
    whole = feed(pair, TEXT[:100], [])
    for slot, page in ((1, 2), (2, 3)):
        programme.reset(slot)
        programme.forward(on_page(batch_of(TEXT[:70], 0, slot=slot), page), pages)
        programme.commit(slot, range(70))
    programme.reset(0)
    sequences = (
        SequenceRows(1, 1, 70, (2,), (0,)),
        SequenceRows(0, 100, 0, (1,), (0, 99)),
        SequenceRows(2, 5, 70, (3,), (1, 3, 4), num_draft=4),
    )
    ids = torch.tensor([TEXT[70], *TEXT[:100], *TEXT[70:75]])
    positions = torch.tensor([70, *range(100), *range(70, 75)])
    found = programme.forward(ForwardBatch(ids, positions, sequences), pages)
    expected = torch.cat((alone[:1], whole[[0, 99]], alone[[1, 3, 4]]))
    assert_near(found, expected, 0.01)


def on_page(batch: ForwardBatch, page: int) -> ForwardBatch:
    return replace(batch, sequences=tuple(replace(s, pages=(page,)) for s in batch.sequences))


def test_a_layer_without_a_fused_form_is_refused(tmp_path):
    family = FAMILIES["qwen35moe"]
    tensors = family.tensors(family.build(seed=1))
    path = write_gguf(tmp_path / "toy.gguf", family.architecture, family.metadata, tensors)
    with GGUFFile.open(path) as file:
        decoder = load_records(file, CPU)
    with pytest.raises(ModelError, match="choose --device cpu"):
        lower(decoder)


@pytest.mark.parametrize("name", LOWERED)
def test_warming_up_leaves_slots_as_new(pairs, name):
    pair = pairs(name)
    expected = feed(pair, TEXT[:60], [50])
    pair.programme.warm_up()
    assert not any(part.any() for part in pair.programme.snapshot(0))
    assert torch.equal(feed(pair, TEXT[:60], [50]), expected)


def feed_packed(
    model: Model, pages: KVPages, chunks: Sequence[int], text: Sequence[int]
) -> torch.Tensor:
    """Compute a text, what is older than two blocks of 256 tokens packed; return all logits."""
    forms = PageAllocator(3), PageAllocator(3, PageForm.PACKED)
    table, logits = PageAllocators(*forms, Grid(256)).new_table(), []
    table.reserve(len(text))
    model.reset(0)
    sizes = iter([*chunks, *[len(text)] * 4])
    while table.length < len(text):
        num_rows = min(next(sizes), table.room, len(text) - table.length)
        batch = batch_of(text[table.length : table.length + num_rows], table.length)
        own = {"pages": table.pages, "packed_pages": table.packed_pages}
        rows = replace(batch.sequences[0], **own)
        logits.append(model.forward(replace(batch, sequences=(rows,)), pages).clone())
        model.commit(0, range(num_rows))
        pages.convert(table.advance(num_rows))
    return torch.cat(logits)


def noted_kinds(programme: DeviceModel, monkeypatch) -> list[StepKind]:
    kinds: list[StepKind] = []
    step = programme._graphs._step
    monkeypatch.setattr(
        programme._graphs, "_step", lambda kind: (kinds.append(kind), step(kind))[1]
    )
    return kinds


def packed_pages_of(model: Model) -> KVPages:
    return KVPages(PagePool(model.kv_layout, 3), PackedPool(model.kv_layout, "q8_0", 3))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen35"])
def test_packed_pages_are_read_as_the_layers_read_them(pairs, name, monkeypatch):
    """In chunks of many rows, and by few rows behind them."""
    pair, text = pairs(name), TEXT * 3
    with GGUFFile.open(pair.path) as file:
        decoder = load_records(file, CPU)
    pages = packed_pages_of(decoder)
    programme = DeviceModel(
        decoder, CPU, pages, num_tokens=VOCAB_SIZE, max_slots=1, exact_pages=3, packed_pages=3,
        chunk_tokens=256, dtype=torch.float32,
    )  # fmt: skip
    expected = feed_packed(pair.layers, packed_pages_of(pair.layers), [], text)
    assert_near(feed_packed(programme, pages, [], text)[1:], expected[1:], 0.02)
    chunks = [256, 256, 256, *[16] * 9]
    kinds = noted_kinds(programme, monkeypatch)
    share = 0.12 if programme.is_recurrent else 0.04
    assert_near(feed_packed(programme, pages, chunks, text)[768:], expected[768:], share)
    assert kinds
    assert all(kind.has_packed for kind in kinds)
    programme.reset(0)
    programme.forward(on_page(batch_of(text[:16], 0), 1), pages)
    assert kinds[-1] == StepKind(16, has_packed=False)


def test_kinds_of_steps_are_captured_from_the_largest_on():
    assert step_kinds((1, 16), may_have_packed=False) == [StepKind(16, False), StepKind(1, False)]
    found = step_kinds((1, 16), may_have_packed=True)
    assert found == [StepKind(rows, form) for rows in (16, 1) for form in (True, False)]


def test_offsets_of_packed_keys_are_refused(pairs):
    with GGUFFile.open(pairs("qwen3").path) as file:
        decoder = load_records(file, CPU)
    layout = decoder.kv_layout
    offsets = [torch.zeros(layer.num_kv_heads, layer.head_dim) for layer in layout.layers]
    pages = KVPages(PagePool(layout, 3), PackedPool(layout, "q8_0", 3, offsets=offsets))
    with pytest.raises(ModelError, match="offsets"):
        DeviceModel(
            decoder, CPU, pages, num_tokens=VOCAB_SIZE, max_slots=1, exact_pages=3, packed_pages=3,
            chunk_tokens=256,
        )  # fmt: skip
