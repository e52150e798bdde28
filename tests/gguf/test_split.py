"""Split models: opened by any part, complete and consistent, or refused with what is wrong."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from ragflash.errors import GGUFInvalid, ModelMissing
from ragflash.gguf.reader import GGUFFile, content_hash

NAMES = [f"blk.{i}.weight" for i in range(5)]


def write_model(path: Path, *, seed: int = 0, tensors: int = 5, per_part: int = 2) -> None:
    """Write 5 matrices of 2 rows in 3 parts, or another model; `per_part` = 0 writes one file."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=per_part)
    writer.add_name(f"model {seed}")
    for i in range(tensors):
        writer.add_tensor(f"blk.{i}.weight", rng.standard_normal((2, 32)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def part(folder: Path, number: int, count: int = 3, name: str = "tiny") -> Path:
    return folder / f"{name}-{number:05}-of-{count:05}.gguf"


def swap(one: Path, two: Path) -> None:
    content = one.read_bytes()
    two.rename(one)
    two.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model in three parts."""
    write_model(tmp_path / "tiny.gguf")
    assert len(list(tmp_path.iterdir())) == 3
    return tmp_path


def values_of(file: GGUFFile) -> dict[str, list[float]]:
    return {name: file.tensor_blocks(name).view(np.float32).ravel().tolist() for name in NAMES}


@pytest.mark.parametrize("given", [1, 2, 3, None])
def test_any_part_and_the_folder_open_the_whole_model(folder: Path, given: int | None) -> None:
    write_model(folder / "whole.gguf", per_part=0)
    whole = GGUFFile.open(folder / "whole.gguf")
    with GGUFFile.open(folder if given is None else part(folder, given)) as file:
        assert list(file.tensors) == NAMES
        assert values_of(file) == values_of(whole)
        assert file.require("general.name", str) == "model 0"
        assert file.paths == tuple(part(folder, number) for number in (1, 2, 3))
        assert file.path == part(folder, 1)
        assert [file.tensors[name].part for name in NAMES] == [0, 0, 1, 1, 2]


def test_metadata_is_that_of_the_first_part(folder: Path) -> None:
    assert "general.name" not in gguf.GGUFReader(part(folder, 2)).fields
    assert GGUFFile.open(part(folder, 2)).metadata["split.no"] == 0


def test_blocks_outlive_a_closed_split_model(folder: Path) -> None:
    with GGUFFile.open(folder) as file:
        blocks = file.tensor_blocks(NAMES[4])
        first = blocks.copy()
    assert np.array_equal(blocks, first)
    with pytest.raises(ValueError, match="closed"):
        file.tensor_blocks(NAMES[0])


@pytest.mark.parametrize("given", [1, 3])
def test_a_missing_part_is_named(folder: Path, given: int) -> None:
    part(folder, 3).unlink()
    part(folder, 3).symlink_to(folder / "deleted")  # as a hub's cache may leave it
    for read in (GGUFFile.open, content_hash):
        with pytest.raises(
            ModelMissing, match=r"lacks 1 of its 3 parts .*: tiny-00003-of-00003\.gguf; down"
        ):
            read(part(folder, given))


def test_many_missing_parts_are_counted(tmp_path: Path) -> None:
    part(tmp_path, 1, 99_999).write_bytes(b"")
    with pytest.raises(
        ModelMissing, match=r"lacks 99998 of its 99999 .*00006-of-99999\.gguf and 99993 more"
    ):
        GGUFFile.open(tmp_path)


def test_swapped_contents_are_refused(folder: Path) -> None:
    swap(part(folder, 2), part(folder, 3))
    with pytest.raises(GGUFInvalid, match=r"tiny-00002-of-00003\.gguf says 2 where 1") as caught:
        GGUFFile.open(part(folder, 1))
    assert caught.value.field == "split.no"


def test_unrelated_files_beside_the_parts_are_ignored(folder: Path) -> None:
    write_model(folder / "other.gguf", seed=1, per_part=0)
    (folder / "notes.txt").write_text("nothing")
    for path in (folder, part(folder, 2)):
        assert list(GGUFFile.open(path).tensors) == NAMES
    assert GGUFFile.open(folder / "other.gguf").metadata["general.name"] == "model 1"


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", per_part=0)
    assert GGUFFile.open(tmp_path).paths == (tmp_path / "whole.gguf",)


def test_a_folder_with_several_models_asks_for_one(folder: Path) -> None:
    write_model(folder / "other.gguf", seed=1)
    with pytest.raises(ModelMissing, match=r"several models; name one of other-00001-of-00003"):
        GGUFFile.open(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="holds no GGUF file"):
        GGUFFile.open(tmp_path)


def test_a_part_of_a_larger_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "large.gguf", tensors=7)
    part(tmp_path, 2, 4, "large").rename(part(folder, 2))
    with pytest.raises(GGUFInvalid, match=r"says 4 where 3 belongs") as caught:
        GGUFFile.open(part(folder, 1))
    assert caught.value.field == "split.count"


def test_a_part_of_a_model_with_more_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "large.gguf", tensors=6)
    part(tmp_path, 2, 3, "large").rename(part(folder, 2))
    with pytest.raises(GGUFInvalid, match=r"says 6 where 5 belongs") as caught:
        GGUFFile.open(part(folder, 1))
    assert caught.value.field == "split.tensors.count"


def rewrite_second(folder: Path, *, tensors: list[str], number: int = 1, name: str = "") -> None:
    """Put another second part in place."""
    writer = gguf.GGUFWriter(part(folder, 2), "llama")
    del writer.kv_data[0]["general.architecture"]
    for key, value in (("split.no", number), ("split.count", 3), ("split.tensors.count", 5)):
        writer.add_uint32(key, value)
    if name:
        writer.add_name(name)
    for tensor in tensors:
        writer.add_tensor(tensor, np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_part_that_names_another_model_is_refused(folder: Path) -> None:
    rewrite_second(folder, tensors=NAMES[2:4], name="model 1")
    with pytest.raises(GGUFInvalid, match="are parts of different models") as caught:
        GGUFFile.open(part(folder, 1))
    assert caught.value.field == "general.name"


def test_a_tensor_in_two_parts_is_refused(folder: Path) -> None:
    rewrite_second(folder, tensors=[NAMES[2], NAMES[0]])
    with pytest.raises(GGUFInvalid, match=r"00002-of-00003\.gguf and tiny-00001-of-00003\.gguf"):
        GGUFFile.open(part(folder, 1))


def test_fewer_tensors_than_were_split_are_refused(folder: Path) -> None:
    rewrite_second(folder, tensors=[NAMES[2]])
    with pytest.raises(GGUFInvalid, match="says 5, the 3 parts hold 4"):
        GGUFFile.open(part(folder, 1))


def test_damage_says_in_which_part(folder: Path) -> None:
    content = part(folder, 2).read_bytes()
    part(folder, 2).write_bytes(content[:-100])
    with pytest.raises(GGUFInvalid, match=r"the file at \d+, in tiny-00002-of-00003\.gguf"):
        GGUFFile.open(part(folder, 1))


def test_a_renamed_part_is_refused(folder: Path) -> None:
    part(folder, 2).rename(folder / "model.gguf")
    with pytest.raises(GGUFInvalid, match=r"model\.gguf is one of 3 parts") as caught:
        GGUFFile.open(folder / "model.gguf")
    assert caught.value.field == "split.count"


def test_a_file_that_is_only_named_like_a_part_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", per_part=0)
    (tmp_path / "whole.gguf").rename(part(tmp_path, 1, 1))
    with pytest.raises(GGUFInvalid, match="lacks this number"):
        GGUFFile.open(part(tmp_path, 1, 1))


def test_a_part_beyond_the_last_is_no_part(tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", per_part=0)
    (tmp_path / "whole.gguf").rename(part(tmp_path, 4, 3))
    assert list(GGUFFile.open(part(tmp_path, 4, 3)).tensors) == NAMES


def test_the_hash_of_a_split_model_depends_on_every_part(folder: Path, tmp_path: Path) -> None:
    whole = content_hash(folder)
    assert whole == content_hash(part(folder, 3)) == content_hash(folder, tmp_path / "cache")
    content = part(folder, 2).read_bytes()
    part(folder, 2).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert content_hash(folder) != whole
