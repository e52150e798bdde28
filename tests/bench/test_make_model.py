"""`bench make-model`: files of the real shape that load, and the same bytes for the same seed."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from typer.testing import CliRunner

from ragflash.bench import make_model as maker
from ragflash.bench.make_model import make_model, variant, write_model
from ragflash.cli import app
from ragflash.engine.build import start_engine
from ragflash.engine.request import ChatMessage, GenerateRequest, SegmentKind, TextSegment
from ragflash.errors import Conflict, ModelError, NotFound, SettingInvalid, StorageError
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.models.shapes import shape_file, shape_names
from tests.models.forwards import batch_of, load, poisoned_pages, run

ROOT = Path(__file__).parents[2]
# Sizes of the 27B shape to sizes a test can compute with: 2 heads of 256, 4 value heads of 64.
TOY_SIZES = {
    **{5120: 256, 17_408: 512, 248_320: 512, 12_288: 1024, 1024: 256, 6144: 512, 10_240: 1024},
    **{48: 4, 128: 128, 256: 256, 4: 4},
}
TOY_METADATA = {
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "context_length": 1024,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 512,
}


def toy_shape(*, mtp: bool = False) -> GGUFFile:
    """Four layers of the 27B shape, each dimension made smaller."""
    real = variant(shape_file("qwen35-27b"), num_layers=4)
    tensors = {}
    for name, tensor in real.tensors.items():
        dimensions = tuple(TOY_SIZES[size] for size in tensor.shape)
        values, size = GGML_QUANT_SIZES[tensor.type]
        tensors[name] = replace(
            tensor, shape=dimensions, num_bytes=prod(dimensions) // values * size
        )
    metadata = {**real.metadata, **{f"qwen35.{key}": v for key, v in TOY_METADATA.items()}}
    return variant(GGUFFile([Path("toy")], [], metadata, tensors), mtp=mtp)


def write_toy(path: Path, *, mtp: bool = False, seed: int = 3, force: bool = False) -> Path:
    write_model(toy_shape(mtp=mtp), path, seed=seed, force=force, progress=lambda *_: None)
    return path


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("made") / "toy.gguf", mtp=True)


def values_of(file: GGUFFile, name: str) -> np.ndarray:
    return gguf.quants.dequantize(file.tensor_blocks(name), file.tensors[name].type)


def test_the_mix_of_formats_is_that_of_the_published_file():
    real = shape_file("qwen35-27b")
    assert dict(variant(real).tensors) == dict(real.tensors)
    assert dict(variant(real).metadata) == dict(real.metadata)


def test_multi_token_prediction_is_one_more_block_of_fifteen_tensors():
    real = shape_file("qwen35-27b")
    made = variant(real, mtp=True)
    assert [*made.tensors][: len(real.tensors)] == [*real.tensors]
    added = [made.tensors[name] for name in [*made.tensors][len(real.tensors) :]]
    assert len(added) == 15
    assert all(tensor.name.startswith("blk.64.") for tensor in added)
    assert Counter(tensor.type.name for tensor in added) == {"F32": 7, "Q4_K": 6, "Q6_K": 2}
    assert made.tensors["blk.64.nextn.eh_proj.weight"].shape == (5120, 10_240)
    assert made.metadata["qwen35.block_count"] == 65
    assert made.metadata["qwen35.nextn_predict_layers"] == 1
    num_values = sum(prod(tensor.shape) for tensor in made.tensors.values())
    assert round(num_values / 1e9, 3) == 27.321


@pytest.mark.parametrize("num_layers", [0, -4, 6, 68])
def test_layers_come_in_whole_patterns(num_layers):
    with pytest.raises(SettingInvalid, match="multiple of 4 up to 64"):
        variant(shape_file("qwen35-27b"), num_layers=num_layers)


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_can_be_written(name):
    shape = variant(shape_file(name), mtp=True)
    pieces = list(maker._pieces(shape, 0))
    assert {piece.tensor.name for piece in pieces} == shape.tensors.keys()
    assert max(piece.num_bytes for piece in pieces) <= maker._PIECE_BYTES


def test_the_header_is_the_table(toy):
    expected = toy_shape(mtp=True)
    with GGUFFile.open(toy) as file:
        assert [*file.tensors] == [*expected.tensors]
        for name, tensor in expected.tensors.items():
            found = file.tensors[name]
            assert (found.shape, found.type) == (tensor.shape, tensor.type)
            assert found.num_bytes == tensor.num_bytes
            assert found.offset_bytes % 32 == 0
        for key, value in expected.metadata.items():
            if key != "general.name":
                assert file.metadata[key] == pytest.approx(value)
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 512
    with_readers_of_others = gguf.GGUFReader(toy)
    assert len(with_readers_of_others.tensors) == len(expected.tensors)


def test_values_are_what_a_trained_model_has(toy):
    with GGUFFile.open(toy) as file:
        for name, tensor in file.tensors.items():
            values = values_of(file, name)
            if tensor.type != GGMLQuantizationType.F32:
                # Five standard errors of a mean over sub-blocks, whose scales they share.
                assert abs(values.mean()) < 5 * 0.016 * (32 / values.size) ** 0.5, name
                assert values.std() == pytest.approx(0.02, rel=0.2), name
            elif name.endswith("norm.weight"):
                assert (values == 1).all(), name
        decays = values_of(file, "blk.0.ssm_a")
        assert -0.52 <= decays.min() < decays.max() <= -0.02
        assert values_of(file, "blk.0.ssm_conv1d.weight").std() == pytest.approx(0.29, rel=0.05)


def test_no_block_is_another(toy):
    with GGUFFile.open(toy) as file:
        for kind in ("Q4_K", "Q6_K"):
            blocks = np.concatenate(
                [
                    file.tensor_blocks(name).reshape(-1, GGML_QUANT_SIZES[tensor.type][1])
                    for name, tensor in file.tensors.items()
                    if tensor.type.name == kind
                ]
            )
            assert len(np.unique(blocks, axis=0)) == len(blocks)


def test_it_loads_and_gives_logits_of_ordinary_size(toy):
    tokens = [*range(40, 90)]
    logits = run(load(toy), tokens, [20])
    assert logits.shape == (50, 512)
    assert logits.isfinite().all()
    assert 0.05 < logits.std() < 5
    assert len(set(logits.argmax(-1).tolist())) > 5


def test_its_block_of_multi_token_prediction_drafts(toy):
    model = load(toy)
    pool = poisoned_pages(model)
    tokens = [*range(40, 60)]
    batch = batch_of(tokens, 0)
    model.reset(0)
    model.forward(batch, pool)
    hidden = model.mtp.hidden(torch.randn(len(tokens), 256), model.step(batch, pool))
    logits = model.mtp.logits(hidden)
    assert logits.isfinite().all()
    assert 0.05 < logits.std() < 5


def test_its_tokens_write_any_text(toy):
    with GGUFFile.open(toy) as file:
        tokenizer = Tokenizer.from_gguf(file)
    text = "the answer: 42 – né\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_text(ids[0]) == "the"
    assert tokenizer.token_text(tokenizer.eos_id) == "<|im_end|>"


def test_it_answers_chat_through_the_engine(toy):
    client = start_engine(toy, dtype="float32", kv_bytes=16 << 20, threads=1)
    try:
        question = (TextSegment(SegmentKind.QUESTION, "What is in the file?"),)
        request = GenerateRequest("one", (ChatMessage("user", question),), max_tokens=6)
        finished = asyncio.run(client.complete(request))
        assert "chatml" in client.info().template
    finally:
        client.close()
    assert len(finished.token_ids) == 6
    assert finished.text


def test_the_same_seed_gives_the_same_bytes(tmp_path, toy):
    again = write_toy(tmp_path / "again.gguf", mtp=True)
    assert again.read_bytes() == toy.read_bytes()
    other = write_toy(tmp_path / "other.gguf", mtp=True, seed=4)
    with GGUFFile.open(toy) as one, GGUFFile.open(other) as two:
        for name in one.tensors:
            if not name.endswith("norm.weight"):
                assert not np.array_equal(one.tensor_blocks(name), two.tensor_blocks(name)), name


def test_pieces_are_written_where_they_belong(tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "_PIECE_BYTES", 1000)
    with GGUFFile.open(write_toy(tmp_path / "toy.gguf")) as file:
        for name, tensor in file.tensors.items():
            values = values_of(file, name)
            assert (values != 0).mean() > 0.9, name
            if tensor.type != GGMLQuantizationType.F32:
                assert values.std() == pytest.approx(0.02, rel=0.2), name


def test_a_file_is_replaced_on_demand_only(tmp_path):
    path = tmp_path / "made" / "toy.gguf"
    before = write_toy(path).read_bytes()
    with pytest.raises(Conflict, match="--force"):
        write_toy(path, seed=5)
    assert path.read_bytes() == before
    assert write_toy(path, seed=5, force=True).read_bytes() != before
    assert [*path.parent.iterdir()] == [path]
    with pytest.raises(Conflict):
        write_toy(path.parent, force=True)


def test_a_full_disk_is_seen_before_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 10**9))
    with pytest.raises(StorageError, match=r"takes 16\.57 GB, and 1\.00 GB are free"):
        make_model("qwen35-27b", tmp_path / "big.gguf")
    assert not [*tmp_path.iterdir()]


def test_what_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def refuse(path, start, piece):
        if piece.tensor.name == "blk.2.ffn_up.weight":
            raise OSError(28, "No space left on device")
        return piece.num_bytes

    monkeypatch.setattr(maker, "_write_piece", refuse)
    with pytest.raises(StorageError, match="No space left"):
        write_toy(tmp_path / "toy.gguf")
    assert not [*tmp_path.iterdir()]


def test_unknown_shapes_and_tensors_are_refused(tmp_path):
    with pytest.raises(NotFound, match="qwen35-27b"):
        make_model("qwen35-28b", tmp_path / "x.gguf")
    shape = toy_shape()
    name = "output_norm.weight"
    odd = {name: replace(shape.tensors[name], type=GGMLQuantizationType.F16)}
    shape = GGUFFile(shape.paths, [], shape.metadata, {**shape.tensors, **odd})
    with pytest.raises(ModelError, match=r"output_norm\.weight \(F16\)"):
        write_model(shape, tmp_path / "x.gguf", seed=0, progress=lambda *_: None)


def test_the_command_says_what_it_wrote_and_what_it_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "shape_file", lambda _: toy_shape())
    path = tmp_path / "toy.gguf"
    command = ["bench", "make-model", "qwen35-27b", "--mtp", "--seed", "3", "--out", str(path)]
    made = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(made.stdout) == {
        "path": str(path),
        "bytes": path.stat().st_size,
        "tensors": 71,
        "seed": 3,
    }
    assert CliRunner().invoke(app, command).exit_code == 1
    again = CliRunner().invoke(app, [*command, "--force", "--layers", "4"])
    assert again.exit_code == 0
    assert "71 tensors, seed 3" in again.stdout
    assert CliRunner().invoke(app, [*command, "--force", "--layers", "5"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "make-model", "none"]).exit_code == 3


def test_progress_ends_at_the_size(tmp_path):
    said = []
    write_model(
        toy_shape(), tmp_path / "toy.gguf", seed=0, progress=lambda *values: said.append(values)
    )
    label, done, total = said[-1]
    assert label == "toy.gguf (MB)"
    assert done == total > 0


def test_it_needs_only_what_the_engine_needs():
    program = (
        "import sys, ragflash.bench.make_model\n"
        "sys.exit(', '.join({'pydantic', 'fastapi', 'qdrant_edge', 'qdrant_client', 'httpx',"
        " 'transformers', 'ragflash_ingest'} & sys.modules.keys()) or 0)"
    )
    roots = (ROOT, ROOT / "kernels", ROOT / "prompts")
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(map(str, roots)), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
