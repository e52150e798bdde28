"""Model files in several parts, named `NAME-00001-of-0000N.gguf` and so on.

Each part is a GGUF file of its own. The first has the model's metadata; all have `split.no`, which
counts from 0 where names count from 1, `split.count`, and `split.tensors.count` of all parts
together. What joins files again leaves `split.count` = 0 behind.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ragflash.errors import GGUFInvalid, ModelMissing
from ragflash.gguf.header import MetadataValue, TensorInfo

_PART_NAME = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Part:
    """The header of one file."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class _SplitName:
    """What the name of a part says."""

    model: str
    count: int

    def parts_in(self, folder: Path) -> tuple[Path, ...]:
        """Where the parts belong, whether they are there or not."""
        return tuple(
            folder / f"{self.model}-{number:05}-of-{self.count:05}.gguf"
            for number in range(1, self.count + 1)
        )


def find_parts(path: Path) -> tuple[Path, ...]:
    """The files of a model, in order: one, or all parts of the one that a part is named of.

    Args:
        path: The file, any part of a split one, or a folder with one split model or one file.

    Raises:
        ModelMissing: A part is not there, or a folder holds no model or several.
    """
    if path.is_dir():
        return _parts_in_folder(path)
    name = _split_name(path)
    return (path,) if name is None else _all_there(name, path.parent)


def join_parts(
    parts: Sequence[Part],
) -> tuple[Mapping[str, MetadataValue], dict[str, TensorInfo]]:
    """Metadata of the first part and the tensors of all, after checking that they belong together.

    Raises:
        GGUFInvalid: A part is not the one that its name says, or of another model.
    """
    first = parts[0]
    if _split_name(first.path) is None:
        _require_whole(first)
        return first.metadata, dict(first.tensors)
    total = _count_in(first, "split.tensors.count")
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        _require_count(part, "split.count", len(parts))
        _require_count(part, "split.no", number)
        _require_count(part, "split.tensors.count", total)
        _require_same_model(part, first)
        for name, tensor in part.tensors.items():
            if name in tensors:
                other = parts[tensors[name].part].path.name
                raise GGUFInvalid(
                    f"tensor {name!r}", tensor.offset_bytes, f"{part.path.name} and {other} hold it"
                )
            tensors[name] = replace(tensor, part=number)
    if len(tensors) != total:
        raise GGUFInvalid(
            "split.tensors.count", 0, f"says {total}, the {len(parts)} parts hold {len(tensors)}"
        )
    return first.metadata, tensors


def _split_name(path: Path) -> _SplitName | None:
    match = _PART_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return _SplitName(match["model"], int(match["count"]))


def _parts_in_folder(folder: Path) -> tuple[Path, ...]:
    """Of the split model in a folder, else of its only file.

    Beside a split model there may be other files, such as the projector of its vision part.
    """
    files = sorted(_files_in(folder))
    names = {name for path in files if (name := _split_name(path))}
    if len(names) == 1:
        return _all_there(names.pop(), folder)
    if not names and len(files) == 1:
        return (files[0],)
    if not files:
        raise ModelMissing(f"the folder {folder} holds no GGUF file")
    raise ModelMissing(f"{folder} holds several models; name one of {_listed(files)}")


def _all_there(name: _SplitName, folder: Path) -> tuple[Path, ...]:
    parts = name.parts_in(folder)
    present = _files_in(folder)
    missing = [part for part in parts if part not in present]
    if missing:
        raise ModelMissing(
            f"{name.model} lacks {len(missing)} of its {name.count} parts in {folder}: "
            f"{_listed(missing)}; download what is missing into the same folder"
        )
    return parts


def _files_in(folder: Path) -> set[Path]:
    try:
        return {path for path in folder.iterdir() if path.suffix == ".gguf" and path.is_file()}
    except OSError as error:
        raise ModelMissing(f"{folder} cannot be read: {error.strerror}") from error


def _listed(paths: Sequence[Path]) -> str:
    more = len(paths) - _NAMES_SHOWN
    names = ", ".join(path.name for path in paths[:_NAMES_SHOWN])
    return f"{names} and {more} more" if more > 0 else names


def _require_whole(file: Part) -> None:
    count = file.metadata.get("split.count", 0)
    if count not in {0, 1}:
        raise GGUFInvalid(
            "split.count",
            0,
            f"{file.path.name} is one of {count!r} parts and its name does not say which; all must "
            "be named as they were made, NAME-00001-of-0000N.gguf",
        )


def _count_in(part: Part, key: str) -> int:
    value = part.metadata.get(key)
    if type(value) is not int:
        raise GGUFInvalid(
            key, 0, f"{part.path.name} is named as a part of a split model and lacks this number"
        )
    return value


def _require_count(part: Part, key: str, expected: int) -> None:
    value = _count_in(part, key)
    if value != expected:
        raise GGUFInvalid(
            key,
            0,
            f"{part.path.name} says {value} where {expected} belongs: it was renamed or is a part "
            "of another model; fetch this part again",
        )


def _require_same_model(part: Part, first: Part) -> None:
    for key, value in part.metadata.items():
        if key != "split.no" and first.metadata.get(key) != value:
            raise GGUFInvalid(
                key,
                0,
                f"differs between {first.path.name} and {part.path.name}: they are parts of "
                "different models",
            )
