"""Headers written to do harm: each is refused by field and offset, before anything is allocated."""

import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash.errors import GGUFInvalid, TokenizerUnknown, UnsupportedTensorType
from ragflash.gguf.header import (
    MAX_ARRAY_ITEMS,
    MAX_HEADER_BYTES,
    MAX_METADATA_ENTRIES,
    MAX_TENSORS,
    MetadataValue,
    TensorInfo,
    parse_header,
)
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from tests.gguf.conftest import write
from tests.processes import environment

U8, U32, BOOL, STRING, ARRAY = 0, 4, 7, 8, 9
PADDING_BYTES = 32  # behind the last tensor, at most


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value


def array(item_type: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", item_type, count) + items


def tensor(
    name: str = "t", extents: tuple[int, ...] = (4,), tensor_type: int = 0, offset: int = 0
) -> bytes:
    shape = struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
    return text(name) + shape + struct.pack("<IQ", tensor_type, offset)


def file_of(
    *entries: bytes,
    tensors: tuple[bytes, ...] = (),
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    data: bytes = bytes(512),
) -> bytes:
    counts = struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    return b"GGUF" + counts + b"".join(entries) + b"".join(tensors) + data


def nested(depth: int) -> bytes:
    return array(ARRAY, 1) * depth + array(U8, 1, b"\x07")


HUGE_ARRAY = bytes.fromhex(
    "47475546 03000000 0000000000000000 0100000000000000 0100000000000000 61"
    "09000000 04000000 0000000000000080"
)

HOSTILE = {
    "array of 2^63 integers": (HUGE_ARRAY, "metadata 'a'", 37),
    "2^63 tensors": (file_of(num_tensors=2**63), "tensor count", 8),
    "more tensors than bytes": (file_of(num_tensors=20), "tensor count", 16),
    "2^63 metadata entries": (file_of(num_entries=2**63), "metadata count", 16),
    "string of 2^62 bytes": (
        file_of(entry("a", STRING, struct.pack("<Q", 2**62))),
        "metadata 'a'",
        37,
    ),
    "key of 2^64-1 bytes": (
        file_of(struct.pack("<Q", 2**64 - 1), num_entries=1),
        "metadata key 0",
        24,
    ),
    "name of a hundred thousand bytes": (
        file_of(tensors=(tensor("t" * 100_000),)),
        "tensor name 0",
        24,
    ),
    "array of 2^60 strings": (file_of(entry("a", ARRAY, array(STRING, 2**60))), "metadata 'a'", 37),
    "strings beyond the end": (
        file_of(entry("a", ARRAY, array(STRING, 3, text("x") + text("y"))), data=b"\xff" * 8),
        "metadata 'a'",
        67,
    ),
    "nine dimensions": (file_of(tensors=(tensor(extents=(1,) * 9),)), "tensor 't' dimensions", 33),
    "no dimensions": (file_of(tensors=(tensor(extents=()),)), "tensor 't' dimensions", 33),
    "an empty dimension": (file_of(tensors=(tensor(extents=(4, 0)),)), "tensor 't' shape", 37),
    "product that wraps": (file_of(tensors=(tensor(extents=(2**64 - 1, 2)),)), "tensor 't'", 96),
    "product that wraps to zero": (
        file_of(tensors=(tensor(extents=(2**32, 2**32)),)),
        "tensor 't'",
        96,
    ),
    "a row that is no whole block": (
        file_of(tensors=(tensor(extents=(33, 2), tensor_type=2),)),
        "tensor 't' shape",
        37,
    ),
    "data beyond the end": (file_of(tensors=(tensor(extents=(129,)),)), "tensor 't'", 64),
    "offset beyond the end": (file_of(tensors=(tensor(offset=2**63),)), "tensor 't'", 2**63 + 64),
    "unaligned offset": (file_of(tensors=(tensor(offset=4),)), "tensor 't' offset", 49),
    "tensors that overlap": (
        file_of(tensors=(tensor("a", (16,)), tensor("b", (4,), offset=32))),
        "tensor 'b'",
        128,
    ),
    "tensor name twice": (
        file_of(tensors=(tensor("a"), tensor("a", offset=32))),
        "tensor 'a'",
        57,
    ),
    "key twice": (
        file_of(entry("a", U8, b"\1"), entry("a", U8, b"\2")),
        "metadata key 'a'",
        38,
    ),
    "alignment 2^30": (
        file_of(entry("general.alignment", U32, struct.pack("<I", 2**30))),
        "metadata 'general.alignment'",
        57,
    ),
    "alignment 0": (
        file_of(entry("general.alignment", U32, bytes(4))),
        "metadata 'general.alignment'",
        57,
    ),
    "alignment 48": (
        file_of(entry("general.alignment", U32, struct.pack("<I", 48))),
        "metadata 'general.alignment'",
        57,
    ),
    "alignment true": (
        file_of(entry("general.alignment", BOOL, b"\1")),
        "metadata 'general.alignment'",
        54,
    ),
    "arrays nested 50 deep": (file_of(entry("a", ARRAY, nested(50))), "metadata 'a'", 85),
    "five thousand arrays": (
        file_of(entry("a", ARRAY, array(ARRAY, 5000, array(U8, 0) * 5000))),
        "metadata 'a'",
        37,
    ),
    "unknown value type": (file_of(entry("a", 13, b"")), "metadata 'a'", 33),
    "unknown item type": (file_of(entry("a", ARRAY, array(99, 1))), "metadata 'a'", 37),
    "truth value 2": (file_of(entry("a", BOOL, b"\2")), "metadata 'a'", 37),
    "text that is not UTF-8": (file_of(entry("a", STRING, text(b"\xff\xfe"))), "metadata 'a'", 37),
    "unknown tensor type": (file_of(tensors=(tensor(tensor_type=250),)), "tensor 't' type", 45),
    "other magic": (b"GGML" + bytes(60), "magic", 0),
    "version 1": (file_of(version=1), "version", 4),
    "version 4": (file_of(version=4), "version", 4),
    "big-endian": (file_of(version=0x03000000), "version", 4),
    "nothing": (b"", "magic", 0),
}


# One second of processor time and 64 MiB of address space for each file.
REFUSE_ALL = """
import json, math, resource, sys
from pathlib import Path
from ragflash.errors import GGUFInvalid
from ragflash.gguf.reader import GGUFFile

refused = []
pages = int(Path("/proc/self/statm").read_text().split()[0])
most_bytes = pages * resource.getpagesize() + 2**26
resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
for path in Path(sys.argv[1]).iterdir():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    try:
        GGUFFile.open(path)
    except GGUFInvalid as error:
        refused.append((path.stem, error.field, error.offset_bytes))
print(json.dumps(refused))
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_by_field_and_offset_within_little_memory(tmp_path: Path, name: str) -> None:
    content, field, offset = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFInvalid) as caught:
            GGUFFile.open(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.field, caught.value.offset_bytes) == (field, offset)
    assert peak_bytes < 2**20


def test_the_message_of_a_big_endian_file_says_what_to_do() -> None:
    with pytest.raises(GGUFInvalid, match="convert it to little-endian"):
        parse(HOSTILE["big-endian"][0])


@pytest.mark.parametrize("length", range(len(HUGE_ARRAY)))
def test_cut_at_every_length(length: int) -> None:
    with pytest.raises(GGUFInvalid) as caught:
        parse(HUGE_ARRAY[:length])
    assert caught.value.offset_bytes <= length


def test_arrays_together_hold_a_bounded_number_of_items() -> None:
    half = MAX_ARRAY_ITEMS // 2
    one = entry("a", ARRAY, array(U8, half, bytes(half)))
    two = entry("b", ARRAY, array(U8, half + 1, bytes(half + 1)))
    with pytest.raises(GGUFInvalid, match=r"metadata 'b'.*arrays may hold"):
        parse(file_of(one, two))


def test_a_header_has_a_largest_size() -> None:
    content = file_of(entry("a", STRING, struct.pack("<Q", MAX_HEADER_BYTES)))
    with pytest.raises(GGUFInvalid, match="the largest header has"):
        parse_header(content, MAX_HEADER_BYTES * 4)


def test_a_type_that_the_format_lacks_is_named() -> None:
    with pytest.raises(UnsupportedTensorType, match="'t' type at byte 45: 250 is no type"):
        parse(HOSTILE["unknown tensor type"][0])


@pytest.mark.parametrize(
    ("content", "largest"),
    [
        (file_of(num_tensors=MAX_TENSORS + 1, data=bytes(64 * MAX_TENSORS)), MAX_TENSORS),
        (
            file_of(num_entries=MAX_METADATA_ENTRIES + 1, data=bytes(64 * MAX_METADATA_ENTRIES)),
            MAX_METADATA_ENTRIES,
        ),
    ],
)
def test_counts_have_limits_whatever_the_size_of_the_file(content: bytes, largest: int) -> None:
    with pytest.raises(GGUFInvalid, match=f"{largest + 1}, at most {largest} are read"):
        parse(content)


def test_a_child_with_64_mib_to_spare_refuses_them_all(tmp_path: Path) -> None:
    for name, (content, _, _) in HOSTILE.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    child = subprocess.run(
        [sys.executable, "-c", REFUSE_ALL, tmp_path],
        env=environment(),
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr.decode()
    refused = {name: (field, offset) for name, field, offset in json.loads(child.stdout)}
    assert refused == {name: (field, offset) for name, (_, field, offset) in HOSTILE.items()}


def test_shallow_nesting_and_empty_arrays_are_read() -> None:
    metadata, _ = parse(
        file_of(entry("a", ARRAY, nested(2)), entry("b", ARRAY, array(STRING, 0)), version=2)
    )
    assert metadata == {"a": (((7,),),), "b": ()}


@pytest.mark.parametrize("tokens", [None, [], ["a", "b"]])
def test_a_vocabulary_that_encodes_nothing_is_refused(
    tmp_path: Path, tokens: list[str] | None
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mute.gguf", "llama")
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_array("tokenizer.ggml.merges", ["a b"])
        if tokens:
            writer.add_token_list(tokens)
            writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    write(writer)
    with pytest.raises((GGUFInvalid, TokenizerUnknown)):
        Tokenizer.from_gguf(GGUFFile.open(tmp_path / "mute.gguf"))


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(small_file: Path, share: float) -> None:
    content = small_file.read_bytes()
    with pytest.raises(GGUFInvalid):
        parse(content[: int(share * (len(content) - PADDING_BYTES))])


def parse(content: bytes) -> tuple[dict[str, MetadataValue], dict[str, TensorInfo]]:
    return parse_header(content, len(content))
