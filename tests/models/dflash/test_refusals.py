"""A drafter's file that would draft badly without failing is refused, and the text says why."""

import json
from dataclasses import replace

import pytest
import torch

from ragflash.errors import ArchitectureUnknown, DrafterIncomplete, ModelError, TensorMissing
from ragflash.models.dflash import Causality, Given, load_drafter
from ragflash.models.dflash.config import evenly_spaced, require_taps
from tests.models.dflash.drafters import (
    FULL,
    NAMES,
    SLIDING,
    TAPS,
    WINDOW,
    gguf_metadata,
    gguf_tensors,
    make_toy,
    write_folder,
    write_gguf_drafter,
)


@pytest.fixture(scope="module")
def toy():
    return make_toy()


@pytest.fixture(scope="module")
def second():
    return make_toy(second=True)


def load_gguf(path, toy, architecture, *, drop=(), add=None, tensors=None, given=None):
    metadata = gguf_metadata(toy, architecture)
    kept = {key: value for key, value in metadata.items() if key not in drop}
    assert len(kept) == len(metadata) - len(drop)
    tensors = gguf_tensors(toy, architecture) if tensors is None else tensors
    write_gguf_drafter(path / "toy.gguf", architecture, kept | (add or {}), tensors)
    return load_drafter(path / "toy.gguf", toy.target, dtype=torch.float32, given=given)


def load_json(path, toy, changes, own=None):
    config = {**toy.config, **changes}
    config["dflash_config"] = {**config["dflash_config"], **(own or {})}
    config = {key: value for key, value in config.items() if value != "absent"}
    nested = config["dflash_config"]
    config["dflash_config"] = {k: v for k, v in nested.items() if v != "absent"}
    folder = write_folder(toy, path / "toy", config)
    return load_drafter(folder, toy.target, dtype=torch.float32)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        *((name, f"{name}.rope.freq_base") for name in NAMES),
        *((name, f"{name}.attention.sliding_window_pattern") for name in NAMES),
        ("dflash", "dflash.attention.sliding_window"),
        ("dflash", "dflash.attention.causal"),
        ("dflash-draft", "dflash-draft.attention.causal"),
        ("dflash", "dflash.block_size"),
        ("dflash", "tokenizer.ggml.mask_token_id"),
    ],
)
def test_names_the_value_that_a_file_lacks(architecture, key, toy, tmp_path):
    with pytest.raises(DrafterIncomplete, match=f"does not say {key}") as caught:
        load_gguf(tmp_path, toy, architecture, drop=[key])
    assert caught.value.missing == (key,)


def test_names_all_that_an_early_file_lacks(toy, tmp_path):
    name = "qwen35-dflash-draft"
    gone = [f"{name}.attention.sliding_window_pattern", f"{name}.dflash.target_layer_ids"]
    with pytest.raises(DrafterIncomplete) as caught:
        load_gguf(tmp_path, toy, name, drop=gone)
    assert caught.value.missing == tuple(gone)


def test_what_a_file_lacks_can_be_given(toy, tmp_path):
    gone = [f"dflash.{name}" for name in ("attention.sliding_window_pattern", "target_layers")]
    given = Given(windows=(WINDOW, WINDOW, None), tap_layers=TAPS, causality=Causality.SLIDING)
    config = load_gguf(tmp_path, toy, "dflash", drop=gone, given=given).config
    assert (config.windows, config.tap_layers) == (given.windows, TAPS)


@pytest.mark.parametrize("name", ["conv_kernel_size", "conv_group_size", "selector_rank"])
def test_names_what_the_second_form_lacks(name, second, tmp_path):
    with pytest.raises(DrafterIncomplete, match=f"dflash.{name}"):
        load_gguf(tmp_path, second, "dflash", drop=[f"dflash.{name}"])


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize("tensor", ["fc.weight", "self_attn.k_norm.weight"])
def test_names_the_tensor_that_a_file_lacks(architecture, tensor, toy, tmp_path):
    tensors = gguf_tensors(toy, architecture)
    name = NAMES[architecture][tensor]
    lost = next(found for found in tensors if found.endswith(name))
    del tensors[lost]
    with pytest.raises(TensorMissing, match=lost):
        load_gguf(tmp_path, toy, architecture, tensors=tensors)


@pytest.mark.parametrize("extra", ["token_embd.weight", "d2t", "markov_w1.weight"])
def test_tensors_of_other_drafters_are_refused(extra, toy, tmp_path):
    tensors = {**gguf_tensors(toy, "dflash"), extra: torch.zeros(4, 4)}
    with pytest.raises(ModelError, match=f"does not use, among them {extra}"):
        load_gguf(tmp_path, toy, "dflash", tensors=tensors)


def test_a_selector_without_its_values_is_not_taken_for_the_first_form(second, tmp_path):
    gone = [f"dflash.{name}" for name in second.config["dflash_config"] if "_" in name][2:]
    with pytest.raises(DrafterIncomplete, match=r"dflash\.selector_top_k"):
        load_gguf(tmp_path, second, "dflash", drop=gone)


def test_another_architecture(toy, tmp_path):
    write_gguf_drafter(tmp_path / "toy.gguf", "qwen3", {}, gguf_tensors(toy, "dflash"))
    with pytest.raises(ArchitectureUnknown, match="'qwen3'; ragflash drafts with: dflash"):
        load_drafter(tmp_path / "toy.gguf", toy.target, dtype=torch.float32)


def test_taps_that_were_shifted_once_too_often(toy, tmp_path):
    """Early converters wrote llama.cpp's architecture without its offset."""
    unshifted = {"dflash.target_layers": list(TAPS)}
    with pytest.raises(ModelError, match=r"\[0, 3, 5\], one too early"):
        load_gguf(tmp_path, toy, "dflash", add=unshifted)
    given = Given(tap_layers=TAPS)
    assert load_gguf(tmp_path, toy, "dflash", add=unshifted, given=given).config.tap_layers == TAPS


def test_published_taps_are_accepted():
    assert evenly_spaced(64, 5) == (1, 16, 31, 46, 61)
    assert evenly_spaced(32, 5) == (1, 8, 15, 22, 29)
    for taps in ((1, 16, 31, 46, 61), (5, 19, 33, 47, 61)):
        require_taps(taps, 64)
    require_taps((1, 12, 23, 35, 46, 57), 60)
    with pytest.raises(ModelError, match="one too early"):
        require_taps((0, 15, 30, 45, 60), 64)
    for taps in ((), (1, 1), (5, 3), (-1, 4), (1, 64)):
        with pytest.raises(ModelError, match="another target"):
            require_taps(taps, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 65}, "hidden size is 64, the target's 65"),
        ({"vocab_size": 90}, "mask token 95 is not among the target's 90"),
        ({"num_layers": 5}, "belongs to another target"),
    ],
)
def test_another_target(changes, message, toy, tmp_path):
    other = replace(toy.target, **changes)
    path = write_gguf_drafter(
        tmp_path / "toy.gguf", "dflash", gguf_metadata(toy, "dflash"), gguf_tensors(toy, "dflash")
    )
    with pytest.raises(ModelError, match=message):
        load_drafter(path, other, dtype=torch.float32)


def test_another_soft_cap(toy, tmp_path):
    with pytest.raises(ModelError, match=r"capped at 30\.0, the target's at None"):
        load_gguf(tmp_path, toy, "dflash", add={"dflash.final_logit_softcapping": 30.0})


@pytest.mark.parametrize(
    ("changes", "own", "missing"),
    [
        ({"rope_theta": "absent"}, {}, ("rope_theta",)),
        ({"layer_types": "absent"}, {}, ("layer_types",)),
        ({"block_size": "absent"}, {}, ("block_size",)),
        ({"sliding_window": "absent"}, {}, ("sliding_window",)),
        (
            {"head_dim": "absent"},
            {"mask_token_id": "absent", "target_layer_ids": "absent"},
            ("head_dim", "mask_token_id", "target_layer_ids"),
        ),
    ],
)
def test_config_json_lacks_values(changes, own, missing, toy, tmp_path):
    with pytest.raises(DrafterIncomplete) as caught:
        load_json(tmp_path, toy, changes, own)
    assert caught.value.missing == missing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_target_layers": 12}, "num_target_layers is 12, only 9"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32, only 96"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"layer_types": [FULL, SLIDING]}, "layer_types"),
        ({"layer_types": [FULL, FULL, "chunked_attention"]}, "layer_types"),
        ({"block_size": 1}, "blocks of 1 rows draft nothing"),
        ({"block_size": True}, "block_size = True"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0 is not a positive number"),
        ({"num_attention_heads": 3}, "cannot be shared out"),
        ({"target_layer_ids": "1,2"}, "is no list of layers"),
    ],
)
def test_config_json_makes_no_sense(changes, message, toy, tmp_path):
    own = {key: changes.pop(key) for key in ("target_layer_ids",) if key in changes}
    with pytest.raises(ModelError, match=message):
        load_json(tmp_path, toy, changes, own)


def test_groups_and_candidates_that_cannot_be(second, tmp_path):
    with pytest.raises(ModelError, match="cannot be grouped"):
        load_json(tmp_path / "a", second, {}, {"conv_group_size": 7})
    with pytest.raises(ModelError, match="more than 16 candidates"):
        load_json(tmp_path / "b", second, {}, {"selector_top_k": 17})


def test_a_folder_without_its_files(toy, tmp_path):
    folder = write_folder(toy, tmp_path / "toy")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(TensorMissing, match="the drafter has no tensor"):
        load_drafter(folder, toy.target, dtype=torch.float32)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no safetensors file"):
        load_drafter(folder, toy.target, dtype=torch.float32)
    (folder / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelError, match="cannot be read"):
        load_drafter(folder, toy.target, dtype=torch.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_drafter(folder, toy.target, dtype=torch.float32)
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="does not describe a DFlash drafter"):
        load_drafter(folder, toy.target, dtype=torch.float32)


def test_a_name_in_two_files_and_a_wrong_shape(toy, tmp_path):
    folder = write_folder(toy, tmp_path / "toy")
    (folder / "model-3.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
    with pytest.raises(ModelError, match="so does another file"):
        load_drafter(folder, toy.target, dtype=torch.float32)
    (folder / "model-3.safetensors").unlink()
    config = {**toy.config, "intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TensorMissing, match="the configuration says"):
        load_drafter(folder, toy.target, dtype=torch.float32)
