"""Model files that the format's own writer wrote."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred bytes with every kind of value and three kinds of tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 1)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 2)
    writer.add_int16("i16", -2)
    writer.add_uint32("u32", 3)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "héllo")
    writer.add_array("strings", ["a", "", "ccc"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("fractions", [0.5, 0.25])
    writer.add_array("truths", [True, False])
    values = np.arange(128, dtype=np.float32).reshape(4, 32)
    writer.add_tensor("plain", values.reshape(2, 2, 32))
    for kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        writer.add_tensor(kind.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor(
        "ternary", np.zeros((1, 54), dtype=np.uint8), raw_dtype=GGMLQuantizationType.TQ1_0
    )
    write(writer)
    return path


@pytest.fixture(scope="session")
def packaged_file(packaged_model_path: Path) -> Iterator[GGUFFile]:
    with GGUFFile.open(packaged_model_path) as file:
        yield file


@pytest.fixture(scope="session")
def packaged_tokenizer(packaged_file: GGUFFile) -> Tokenizer:
    return Tokenizer.from_gguf(packaged_file)


TokenizerFile = Callable[..., GGUFFile]


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> TokenizerFile:
    """Writes a file with all 256 byte tokens, then what merges make, then `others`."""

    def build(
        *,
        pre: str | None = "gpt-2",
        model: str = "gpt2",
        merges: Sequence[str] = ("h e", "l l", "he ll", "hell o"),
        others: Sequence[tuple[str, int]] = (),
        settings: dict[str, int | bool | str] | None = None,
        without: str = "",
        unmade: Sequence[str] = (),
    ) -> GGUFFile:
        tokens = [symbol for symbol in byte_symbols() if symbol not in without]
        tokens += [merge.replace(" ", "", 1) for merge in merges if merge not in unmade]
        types = [int(gguf.TokenType.NORMAL)] * len(tokens) + [kind for _, kind in others]
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, *(token for token, _ in others)])
        writer.add_token_types(types)
        writer.add_array("tokenizer.ggml.merges", list(merges))
        for key, value in (settings or {}).items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case str():
                    writer.add_string(key, value)
        write(writer)
        return GGUFFile.open(path)

    return build


VocabularyFile = Callable[..., GGUFFile]


@pytest.fixture
def vocabulary_file(tmp_path: Path) -> VocabularyFile:
    """Writes a file with these tokens; `metadata` may be anything that the format has."""

    def build(
        tokens: Sequence[tuple[str, int]],
        *,
        model: str,
        scores: Sequence[float] = (),
        merges: Sequence[str] = (),
        pre: str | None = None,
        **metadata: bool | int,
    ) -> GGUFFile:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list([token for token, _ in tokens])
        writer.add_token_types([kind for _, kind in tokens])
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        if scores:
            writer.add_token_scores(scores)
        if merges:
            writer.add_token_merges(merges)
        for key, value in metadata.items():
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
            add(f"tokenizer.ggml.{key}", value)
        write(writer)
        return GGUFFile.open(path)

    return build


@pytest.fixture(scope="session")
def gemma_tokenizer(gemma_model_path: Path) -> Tokenizer:
    with GGUFFile.open(gemma_model_path) as file:
        return Tokenizer.from_gguf(file)


def byte_symbols() -> list[str]:
    """The alphabet of byte-level vocabularies in the order of their characters."""
    return [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
