"""The reader against the format's own library, on a written file and on a real model."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from ragflash.errors import GGUFInvalid, ModelMissing, TensorMissing, UnsupportedTensorType
from ragflash.gguf.packaged import packaged_model_path as find_packaged_model
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.gguf.types import READABLE_FORMATS

PACKAGED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="module")
def library_reader(packaged_model_path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(packaged_model_path)  # seconds: it wraps every string of the vocabulary


@pytest.fixture
def small(small_file: Path) -> GGUFFile:
    return GGUFFile.open(small_file)


def test_every_kind_of_value_comes_back(small: GGUFFile) -> None:
    assert dict(small.metadata) == {
        "general.architecture": "llama",
        "u8": 1,
        "i8": -1,
        "u16": 2,
        "i16": -2,
        "u32": 3,
        "i32": -3,
        "u64": 2**63,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 0.1,
        "bool": True,
        "string": "héllo",
        "strings": ("a", "", "ccc"),
        "numbers": (1, -2, 3),
        "fractions": (0.5, 0.25),
        "truths": (True, False),
    }
    assert small.metadata["bool"] is True


def test_shapes_are_in_the_order_of_torch(small: GGUFFile) -> None:
    assert small.tensors["plain"].shape == (2, 2, 32)
    assert small.tensors["Q4_1"].shape == (4, 32)
    assert small.tensors["Q8_0"].type is GGMLQuantizationType.Q8_0
    assert list(small.tensors) == ["plain", "Q4_1", "Q8_0", "ternary"]


def test_blocks_are_rows_of_stored_bytes(small: GGUFFile) -> None:
    values = np.arange(128, dtype=np.float32).reshape(4, 32)
    assert np.array_equal(small.tensor_blocks("plain").view(np.float32), values)
    for kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        assert np.array_equal(small.tensor_blocks(kind.name), gguf.quants.quantize(values, kind))


def test_blocks_become_a_torch_tensor_without_a_copy(small: GGUFFile) -> None:
    blocks = small.tensor_blocks("Q8_0")
    assert torch.from_numpy(blocks).data_ptr() == blocks.ctypes.data
    assert blocks.ctypes.data == small.tensor_blocks("Q8_0").ctypes.data


def test_writing_to_blocks_leaves_the_file_alone(small_file: Path) -> None:
    before = small_file.read_bytes()
    GGUFFile.open(small_file).tensor_blocks("plain")[:] = 0
    assert small_file.read_bytes() == before


def test_blocks_outlive_the_file_object(small_file: Path) -> None:
    with GGUFFile.open(small_file) as file:
        blocks = file.tensor_blocks("plain")
        first = blocks.copy()
    assert np.array_equal(blocks, first)
    with pytest.raises(ValueError, match="closed"):
        file.tensor_blocks("plain")


def test_a_format_without_a_kernel_is_refused_when_read(small: GGUFFile) -> None:
    assert small.tensors["ternary"].shape == (1, 256)
    with pytest.raises(
        UnsupportedTensorType,
        match=r"'ternary' at byte \d+: is stored as TQ1_0; ragflash reads F32, .*IQ4_XS",
    ):
        small.tensor_blocks("ternary")


def test_an_absent_tensor_is_named(small: GGUFFile) -> None:
    with pytest.raises(TensorMissing, match=r"'output\.weight'"):
        small.tensor_blocks("output.weight")


def test_getters_check_the_type(small: GGUFFile) -> None:
    assert small.require("u32", int) == 3
    assert small.get("absent", int) is None
    assert small.require_array("strings", str) == ("a", "", "ccc")
    assert small.get_array("absent", str) is None
    with pytest.raises(GGUFInvalid, match="bool"):
        small.require("bool", int)
    with pytest.raises(GGUFInvalid, match="absent"):
        small.require("absent", int)
    with pytest.raises(GGUFInvalid, match="not an array of str"):
        small.require_array("numbers", str)
    with pytest.raises(GGUFInvalid, match="not an array of int"):
        small.require_array("u32", int)
    with pytest.raises(GGUFInvalid, match="absent"):
        small.require_array("absent", int)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.gguf", "absent.gguf cannot be read: No such file"),
        ("absent/tiny-00001-of-00002.gguf", "absent cannot be read: No such file"),
        (".", "holds no GGUF file"),
    ],
)
def test_a_path_without_a_file_is_a_missing_model(tmp_path: Path, name: str, message: str) -> None:
    for read in (GGUFFile.open, content_hash):
        with pytest.raises(ModelMissing, match=message):
            read(tmp_path / name)


def test_packaged_model_is_found_without_importing_it(packaged_model_path: Path) -> None:
    assert find_packaged_model() == packaged_model_path


def test_packaged_metadata_equals_the_library(
    packaged_file: GGUFFile, library_reader: gguf.GGUFReader
) -> None:
    expected = {
        key: tuple(value) if isinstance(value := field.contents(), list) else value
        for key, field in library_reader.fields.items()
        if not key.startswith("GGUF.")
    }
    assert dict(packaged_file.metadata) == expected


def test_packaged_tensors_equal_the_library(
    packaged_file: GGUFFile, library_reader: gguf.GGUFReader
) -> None:
    assert list(packaged_file.tensors) == [tensor.name for tensor in library_reader.tensors]
    for theirs in library_reader.tensors:
        ours = packaged_file.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.type, ours.offset_bytes) == (theirs.tensor_type, theirs.data_offset)
        assert ours.num_bytes == theirs.n_bytes
        if theirs.name.startswith(("blk.0.", "blk.29.", "output")):
            stored = theirs.data.reshape(-1).view(np.uint8)
            assert np.array_equal(packaged_file.tensor_blocks(theirs.name).reshape(-1), stored)


def test_every_packaged_tensor_can_be_read(packaged_file: GGUFFile) -> None:
    assert {tensor.type for tensor in packaged_file.tensors.values()} <= set(READABLE_FORMATS)


def test_content_hash_is_sha256(packaged_model_path: Path) -> None:
    assert content_hash(packaged_model_path) == PACKAGED_SHA256


def test_content_hash_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    path.write_bytes(b"one")
    first = content_hash(path, cache)
    (entry,) = (cache / "content_hashes").iterdir()
    stored = entry.stat().st_mtime_ns
    assert content_hash(path, cache) == first
    assert entry.stat().st_mtime_ns == stored
    path.write_bytes(b"three")
    assert content_hash(path, cache) == content_hash(path) != first


def test_a_kept_hash_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    first = content_hash(path, tmp_path / "cache")
    monkeypatch.setattr("ragflash.gguf.reader.hashlib.file_digest", None)
    assert content_hash(path, tmp_path / "cache") == first


def test_a_damaged_kept_hash_is_computed_again(tmp_path: Path) -> None:
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    path.write_bytes(b"one")
    first = content_hash(path, cache)
    (entry,) = (cache / "content_hashes").iterdir()
    entry.write_bytes(entry.read_bytes().replace(first[:4].encode(), b"0000"))
    assert content_hash(path, cache) == first
