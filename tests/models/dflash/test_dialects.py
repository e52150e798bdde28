"""The same drafter in every dialect of its files drafts the same, bit for bit."""

import pytest
import torch

from ragflash.models.dflash import Causality, Given, load_drafter
from tests.models.dflash.drafters import (
    BLOCK,
    FULL,
    MASK,
    NAMES,
    SLIDING,
    TAPS,
    TARGET_LAYERS,
    THETA,
    WINDOW,
    gguf_metadata,
    gguf_tensors,
    load_toy,
    make_toy,
    sequence_after,
    write_gguf_drafter,
)

CONVERTED = {"dflash": Causality.NEVER, "dflash-draft": Causality.NEVER}


def rows_of(model, toy):
    ring = model.new_ring(64)
    ring.append(model.context(toy.features(30), 0))
    return model.hidden([7, *[MASK] * (BLOCK - 1)], ring)


def write(toy, architecture, folder, **options):
    metadata, tensors = gguf_metadata(toy, architecture), gguf_tensors(toy, architecture)
    return write_gguf_drafter(folder / "toy.gguf", architecture, metadata, tensors, **options)


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("architecture", NAMES)
def test_reads_back_equal(architecture, second, tmp_path):
    toy = make_toy(second=second, is_causal=False if architecture in CONVERTED else None)
    path = write(toy, architecture, tmp_path)
    model = load_drafter(path, toy.target, dtype=torch.float32)
    expected = load_toy(toy, tmp_path / "folder")
    assert model.config == expected.config
    assert torch.equal(rows_of(model, toy), rows_of(expected, toy))


@pytest.mark.parametrize("architecture", NAMES)
def test_what_it_says(architecture, tmp_path):
    path = write(make_toy(), architecture, tmp_path)
    config = load_drafter(path, make_toy().target, dtype=torch.float32).config
    assert config.tap_layers == TAPS
    assert config.windows == (WINDOW, WINDOW, None)
    assert config.causality is CONVERTED.get(architecture, Causality.SLIDING)
    assert (config.rope_theta, config.block_size, config.mask_token_id) == (THETA, BLOCK, MASK)


@pytest.mark.parametrize("is_causal", [True, False])
def test_causality_is_the_file_s(is_causal, tmp_path):
    toy = make_toy(is_causal=is_causal)
    config = load_drafter(write(toy, "dflash", tmp_path), toy.target, dtype=torch.float32).config
    assert [config.is_causal(layer) for layer in range(3)] == [is_causal] * 3


def test_without_a_word_layers_with_a_window_are_causal(tmp_path):
    config = load_toy(make_toy((FULL, SLIDING)), tmp_path / "toy").config
    assert [config.is_causal(layer) for layer in range(2)] == [False, True]


@pytest.mark.parametrize("name", ["dflash.target_layers", "target_layer_ids"])
def test_taps_under_other_names(name, tmp_path):
    """The architecture decides from where they count, whatever the key is called."""
    toy, architecture = make_toy(), "qwen35-dflash-draft"
    metadata = gguf_metadata(toy, architecture)
    taps = metadata.pop(f"{architecture}.dflash.target_layer_ids")
    metadata[f"{architecture}.{name}"] = taps
    path = write_gguf_drafter(
        tmp_path / "toy.gguf", architecture, metadata, gguf_tensors(toy, architecture)
    )
    assert load_drafter(path, toy.target, dtype=torch.float32).config.tap_layers == TAPS


@pytest.mark.parametrize("form", ["dense", "records"])
def test_quantised_matrices_draft_nearly_the_same(form, tmp_path):
    """More features than a matrix in records takes at once, too."""
    toy = make_toy(second=True)
    path = write(toy, "qwen35-dflash-draft", tmp_path, quantized=True)
    model = load_drafter(path, toy.target, dtype=torch.float32, form=form)
    features = toy.features(50)
    found, expected = (
        sequence_after(drafter, features).draft(7, 50, BLOCK - 1).log_probs
        for drafter in (model, load_toy(toy, tmp_path / "folder"))
    )
    assert 0 < (found - expected).abs().mean() < 0.2 < expected.std()


def test_what_the_caller_says_goes_before_the_file(tmp_path):
    toy = make_toy()
    given = Given((5, None, None), Causality.ALWAYS, (0, 2, TARGET_LAYERS - 1), 3.0)
    for path in (write(toy, "dflash", tmp_path), None):
        if path is None:
            config = load_toy(toy, tmp_path / "folder", given).config
        else:
            config = load_drafter(path, toy.target, dtype=torch.float32, given=given).config
        said = (config.windows, config.causality, config.tap_layers, config.embedding_scale)
        assert said == (given.windows, given.causality, given.tap_layers, given.embedding_scale)
