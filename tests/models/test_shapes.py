"""Sizes read from headers, and the memory plans that follow from them."""

from dataclasses import dataclass, replace

import pytest
import torch
from gguf import GGMLQuantizationType

from ragflash.bench.drafter_shape import DRAFTERS
from ragflash.bench.make_model import variant
from ragflash.errors import DeviceMemoryShort, ModelError
from ragflash.gguf.reader import GGUFFile, TensorInfo
from ragflash.kvcache.formats import KVFormat
from ragflash.kvcache.planner import (
    DrafterShape,
    ModelShape,
    PlanOptions,
    alternatives,
    captured_chunks,
    kv_bytes,
    most_context_tokens,
    plan_memory,
    plan_to_fit,
)
from ragflash.models.dflash.shape import shape_of
from ragflash.models.shapes import device_bytes, model_shape, shape_file, shape_names
from ragflash_kernels.qmatmul.formats import RECORD_FORMATS
from ragflash_kernels.qmatmul.packing import pack_matrix
from tests.kernels.quantised import random_blocks
from tests.models.families import FAMILIES
from tests.models.forwards import load
from tests.models.toy_files import write_gguf

GIB = 1 << 30
LOCAL_HEAD_SIZES = [
    f"{key}_swa"
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
]


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return model_shape(shape_file("qwen35-27b"))


def test_the_27b_shape_is_what_its_published_files_are(shape):
    assert shape_names() == ("qwen35-27b",)
    assert shape.kv_values == 32_768
    assert shape.state_bytes == 48 * 4 * (48 * 128 * 128 + 3 * 10_240)
    assert round(shape.file_bytes / 1e9, 3) == 16.536
    assert round((shape.file_bytes - shape.host_weight_bytes) / 1e9, 3) == 15.821
    assert (shape.vocab_size, shape.context_tokens) == (248_320, 262_144)


def test_matrices_take_what_their_records_take(tmp_path, shape):
    assert 1.019 < shape.device_weight_bytes / (shape.file_bytes - shape.host_weight_bytes) < 1.021
    for name in RECORD_FORMATS:
        rows, columns = 70, 512
        blocks = random_blocks(name, rows, columns)
        kind = GGMLQuantizationType[name]
        stored = TensorInfo("blk.0.ffn_up.weight", (rows, columns), kind, 0, blocks.nbytes)
        assert device_bytes(stored) == pack_matrix(blocks, block_format=name).records.nbytes
    unknown = TensorInfo("blk.0.ffn_up.weight", (64, 256), GGMLQuantizationType.Q2_K, 0, 64 * 84)
    assert device_bytes(unknown) == 64 * 256 * 2
    vector = TensorInfo("output_norm.weight", (64,), GGMLQuantizationType.F32, 0, 256)
    assert device_bytes(vector) == 256


def test_prefill_unpacks_matrices_of_one_input_together(shape):
    assert shape.largest_group_values == 2 * 5120 * 17_408
    assert shape.widest_group == 2 * 17_408


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (65_536, 939_524_096),
        (131_072, 1_879_048_192),
        (138_696, 1_988_345_856),
        (262_144, 3_758_096_384),
    ],
)
def test_keys_and_values_take_what_the_format_says(shape, num_tokens, expected):
    assert kv_bytes(shape, num_tokens, "tq3_0") == expected
    assert num_tokens * 65_536 == kv_bytes(shape, num_tokens, "f16")
    assert round(kv_bytes(shape, num_tokens, "f16") / expected, 2) == 4.57


def test_other_forms_of_the_same_values(shape):
    assert kv_bytes(shape, 138_696, "f16") == 9_089_581_056
    one_scale_a_head = KVFormat(256, 256 + 4)
    assert 138_696 * one_scale_a_head.stored_bytes(shape.kv_values) == 4_615_802_880
    assert KVFormat(32, 18).stored_bytes(80) == 3 * 18


def test_the_state_is_a_constant_of_a_sequence(shape):
    short, long = (
        plan_memory(shape, PlanOptions(24 * GIB, num_tokens)) for num_tokens in (4096, 262_144)
    )
    taken = {part.name: part.num_bytes for part in short.parts}
    assert taken["recurrent state"] == shape.state_bytes
    row = 48 * 4 * (10_240 + 16 * 128 + 48 * 128 + 48)
    assert taken["tapes of rows to verify"] == 32 * row
    assert taken["recurrent state"] in [part.num_bytes for part in long.parts]
    stored = [
        sum(part.num_bytes for part in plan.parts if "of their" in part.name or "tq3" in part.name)
        for plan in (short, long)
    ]
    assert stored[1] - stored[0] == kv_bytes(shape, 262_144 - 4096, "tq3_0")


def test_a_full_context_fits_a_card_of_24_gb_with_packed_keys_only(shape):
    options = PlanOptions(24 * GIB, 138_696)
    plan = plan_memory(shape, options)
    assert plan.fits
    assert plan.total_bytes - 2**30 < 23.5e9, "less the spare"
    assert plan_memory(shape, replace(options, slots=4)).fits
    assert plan_memory(shape, replace(options, context_tokens=262_144)).fits
    plain = plan_memory(shape, replace(options, kv_format="f16"))
    assert not plain.fits
    assert plain.left_bytes < -GIB


def test_chunks_are_captured_while_launches_are_what_takes_time(shape):
    small = replace(shape, state_bytes=0, largest_group_values=2 * 576 * 1536)
    assert captured_chunks(small) == (64, 128, 256, 512, 1024, 2048)
    assert captured_chunks(replace(small, largest_group_values=2 * 4096 * 14_336)) == (64, 128)
    assert captured_chunks(shape) == (), "of recurrent layers none"
    options = PlanOptions(24 * GIB, 4096)
    taken, without = (
        {part.name: part.num_bytes for part in plan_memory(sizes, options).parts}
        for sizes in (small, shape)
    )
    row_bytes = taken["rows of a prompt"] // (2048 + 256)
    assert taken["rows of captured chunks"] == 4032 * row_bytes
    assert "rows of captured chunks" not in without


def test_pages_are_those_of_the_plan(shape):
    options = PlanOptions(24 * GIB, 138_696, slots=2, documents=1)
    plan = plan_memory(shape, options)
    assert plan.packed_pages == 542
    assert plan.exact_pages == 3 * 17
    taken = {part.name: part.num_bytes for part in plan.parts}
    assert taken["newest keys and values, f16"] == 3 * 17 * 256 * 65_536
    short = plan_memory(shape, replace(options, context_tokens=1000))
    assert (short.packed_pages, short.exact_pages) == (4, 12)
    plain = plan_memory(shape, replace(options, context_tokens=1000, kv_format="f16"))
    assert (plain.packed_pages, plain.exact_pages) == (0, 4)
    assert plan.allocator_bytes < 24 * GIB - 2**30


def test_the_longest_context_is_the_last_that_fits(shape):
    options = PlanOptions(int(22.6e9), 138_696, kv_format="q8_0")
    most = most_context_tokens(shape, options)
    assert 0 < most < 138_696
    assert plan_memory(shape, replace(options, context_tokens=most)).fits
    assert not plan_memory(shape, replace(options, context_tokens=most + 256)).fits
    assert most_context_tokens(shape, replace(options, vram_bytes=8 * GIB)) == 0
    assert most_context_tokens(shape, replace(options, vram_bytes=80 * GIB)) == 262_144


def test_alternatives_say_what_each_option_costs(shape):
    costs = dict(alternatives(shape, PlanOptions(24 * GIB, 138_696, kv_format="q8_0", slots=2)))
    assert set(costs) == {
        *("--kv f16", "--kv q4_0", "--kv tq4", "--kv tq3_0"),
        *("--slots 1", "--slots 3"),
    }
    assert costs["--kv f16"] < costs["--kv tq4"] <= costs["--kv tq3_0"]
    assert costs["--slots 1"] > costs["--slots 3"]


@pytest.fixture(scope="module")
def drafter() -> DrafterShape:
    return shape_of(DRAFTERS["dflash-qwen35-27b"].file("drafter"))


def test_a_drafter_is_planned_part_by_part(shape, drafter):
    options = PlanOptions(24 * GIB, 138_696, slots=2, drafter=drafter)
    taken = {part.name: part.num_bytes for part in plan_memory(shape, options).parts}
    own = {name: size for name, size in taken.items() if name.startswith("drafter")}
    assert own["drafter"] == drafter.weight_bytes
    assert own["drafter: keys and values"] == 2 * 18 * 256 * 20_480
    assert own["drafter: rows that it reads"] == 2 * 5 * 5120 * 2 * (2048 + 32)
    moved = 2 * drafter.ring_bytes
    assert own["drafter: work"] == moved + 5 * 16 * 248_320 * 4, "matrices fit the model's space"


def test_a_27b_with_a_drafter_fits_a_card_of_24_gb(shape, drafter):
    options = PlanOptions(24 * GIB, 138_696, drafter=drafter)
    assert plan_memory(shape, options).fits
    crowded = replace(options, kv_format="q8_0", slots=2, context_tokens=120_000)
    with pytest.raises(DeviceMemoryShort, match=r"a drafter and --slots 2 takes .*, or no drafter"):
        plan_to_fit(shape, crowded, shrinks=False)


def test_rows_that_drafters_read_are_planned_where_there_are_some(shape):
    own = model_shape(variant(shape_file("qwen35-27b"), mtp=True))
    options = PlanOptions(24 * GIB, 138_696, kv_format="q4_0")
    taken = {part.name: part.num_bytes for part in plan_memory(own, options).parts}
    assert taken["rows that drafters read"] == 2 * 5120 * 2 * (2048 + 32)
    for without in (plan_memory(own, replace(options, mtp=False)), plan_memory(shape, options)):
        assert "rows that drafters read" not in {part.name for part in without.parts}
    assert own.kv_values - shape.kv_values == 2048
    assert own.device_weight_bytes > shape.device_weight_bytes
    assert own.host_weight_bytes == shape.host_weight_bytes


def test_an_unnamed_context_shrinks_to_what_fits(shape):
    options = PlanOptions(int(22.6e9), 300_000, kv_format="q8_0")
    plan = plan_to_fit(shape, options, shrinks=True)
    assert plan.fits
    assert plan.options.context_tokens == most_context_tokens(shape, options)
    roomy = plan_to_fit(shape, replace(options, vram_bytes=80 * GIB), shrinks=True)
    assert roomy.options.context_tokens == 262_144


def test_what_does_not_fit_is_refused_with_the_nearest_settings(shape):
    options = PlanOptions(24 * GIB, 138_696, kv_format="q8_0", slots=4)
    most = most_context_tokens(shape, options)
    with pytest.raises(DeviceMemoryShort, match=rf"--kv tq3_0.*--ctx {most}$") as caught:
        plan_to_fit(shape, options, shrinks=False)
    assert "--kv f16" not in caught.value.detail
    fewer = replace(options, vram_bytes=int(24.6 * GIB))
    with pytest.raises(DeviceMemoryShort, match="--slots 3"):
        plan_to_fit(shape, fewer, shrinks=False)
    small = replace(options, vram_bytes=16 * GIB, slots=1)
    with pytest.raises(DeviceMemoryShort, match="a smaller model or quantisation"):
        plan_to_fit(shape, small, shrinks=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shape_is_what_the_loaded_model_has(tmp_path, name):
    family = FAMILIES[name]
    tensors = family.tensors(family.build())
    path = write_gguf(tmp_path / "toy.gguf", family.architecture, family.metadata, tensors)
    with GGUFFile.open(path) as file:
        found = model_shape(file)
    model = load(path)
    assert tuple(found.kv_layers) == model.kv_layout.layers
    assert found.context_tokens == model.context_tokens
    assert found.vocab_size == model.vocab_size
    model.reset(0)
    assert found.state_bytes == sum(state.nbytes for state in model.snapshot(0))
    assert (found.tape_bytes > 0) == model.is_recurrent


@dataclass(frozen=True)
class OddFile:
    overrides: dict
    words: str


@pytest.mark.parametrize(
    "odd",
    [
        OddFile({"attention.head_count_kv": [2, 1]}, "one a layer"),
        OddFile({"attention.head_count_kv": [2] * 6 + [3]}, "3 does not divide 4"),
        OddFile({"attention.sliding_window_pattern": [True, False]}, "2 of 7 layers"),
        OddFile({"attention.shared_kv_layers": 7}, "no keys to share"),
        OddFile({"block_count": 4_000_000_000}, "4000000000 blocks cannot be made of"),
        OddFile(dict.fromkeys(LOCAL_HEAD_SIZES, 33), "heads of 33 values"),
    ],
    ids=lambda odd: odd.words,
)
def test_refuses_sizes_that_do_not_fit_together(tmp_path, odd):
    metadata = {**FAMILIES["gemma4"].metadata, **odd.overrides}
    tensors = {f"blk.{layer}.attn_q.weight": torch.zeros(1, 32) for layer in range(7)}
    path = write_gguf(tmp_path / "odd.gguf", "gemma4", metadata, tensors)
    with GGUFFile.open(path) as file, pytest.raises(ModelError, match=odd.words):
        model_shape(file)
