"""Real headers with bytes changed, put in and taken out: read, or refused as damaged."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragflash.errors import GGUFInvalid
from ragflash.gguf.reader import GGUFFile

FRONT_BYTES = 2048  # magic, counts, and the metadata before the vocabulary
TABLE_BYTES = 20_000  # the tensor table at the end of the real header

NUMBERS = st.sampled_from([0, 1, 8, 9, 255, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])
PUT = (
    st.binary(max_size=12)
    | NUMBERS.map(lambda number: struct.pack("<Q", number))
    | NUMBERS.map(lambda number: struct.pack("<I", number & 0xFFFFFFFF))
)


@pytest.fixture(scope="module")
def real_header(packaged_file: GGUFFile) -> bytes:
    end = min(tensor.offset_bytes for tensor in packaged_file.tensors.values())
    with packaged_file.path.open("rb") as file:
        return file.read(end)


@st.composite
def mutations(draw: st.DrawFn, length: int) -> list[tuple[int, int, bytes]]:
    """Up to 4 of: position, bytes to remove, bytes to put there; the last position first."""
    position = (
        st.integers(0, min(FRONT_BYTES, length))
        | st.integers(max(0, length - TABLE_BYTES), length)
        | st.integers(0, length)
    )
    in_place = st.tuples(position, PUT).map(lambda it: (it[0], len(it[1]), it[1]))
    moving = st.tuples(position, st.integers(0, 12), PUT)
    return sorted(draw(st.lists(in_place | moving, min_size=1, max_size=4)), reverse=True)


def mutate(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for position, removed, put in changes:
        content = content[:position] + put + content[position + removed :]
    return content


def check(path: Path, content: bytes, file_bytes: int) -> None:
    """Open a file of some bytes and zeros behind them."""
    path.write_bytes(content)
    os.truncate(path, file_bytes)
    try:
        file = GGUFFile.open(path)
    except GGUFInvalid as error:
        assert error.field
        assert str(error.offset_bytes) in str(error)
        return
    for tensor in file.tensors.values():
        assert 0 < tensor.offset_bytes <= tensor.offset_bytes + tensor.num_bytes <= file_bytes


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_real_header(
    tmp_path: Path, real_header: bytes, packaged_file: GGUFFile, data: st.DataObject
) -> None:
    changes = data.draw(mutations(len(real_header)))
    whole = packaged_file.path.stat().st_size
    file_bytes = data.draw(st.sampled_from([whole, whole - 1024, len(real_header)]))
    check(tmp_path / "fuzzed.gguf", mutate(real_header, changes), file_bytes)


@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_small_file(tmp_path: Path, small_file: Path, data: st.DataObject) -> None:
    content = mutate(small_file.read_bytes(), data.draw(mutations(small_file.stat().st_size)))
    check(tmp_path / "fuzzed.gguf", content, len(content))


def test_a_real_file_that_lost_its_last_kilobyte(
    tmp_path: Path, real_header: bytes, packaged_file: GGUFFile
) -> None:
    path, whole = tmp_path / "cut.gguf", packaged_file.path.stat().st_size
    path.write_bytes(real_header)
    os.truncate(path, whole - 1024)
    last = max(packaged_file.tensors.values(), key=lambda tensor: tensor.offset_bytes)
    with pytest.raises(GGUFInvalid, match=f"the file at {whole - 1024}") as caught:
        GGUFFile.open(path)
    assert caught.value.field == f"tensor {last.name!r}"
    assert caught.value.offset_bytes == last.offset_bytes
