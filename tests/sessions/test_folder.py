"""What was stored is found again, by whoever may, as long as everything is the same."""

import mmap
import os
import stat
import subprocess
import sys
from array import array
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash.errors import DataFolderLocked, NotFound
from ragflash.kvcache.allocator import PageForm
from ragflash.kvcache.archive import PIECE_BYTES
from ragflash.sessions import (
    NO_SOURCE,
    FileMiss,
    FileMissReason,
    PageItem,
    PartItem,
    SegmentRecord,
    SnapshotItem,
)
from ragflash.sessions import (
    format as layout,
)
from tests.processes import environment
from tests.sessions.samples import (
    DOCUMENT,
    IDENTITY,
    ITEMS,
    RULES,
    TURN,
    CopiedLanding,
    bytes_of,
    fetch,
    files_of,
    find,
    is_stored,
    open_folder,
    read,
    record_of,
    store,
)


def test_a_chain_is_found_whole_and_read_bit_by_bit(folder):
    assert store(folder, RULES) is None
    assert store(folder, RULES, DOCUMENT, source_ids=["doc"]) is None
    assert is_stored(folder, RULES)
    assert is_stored(folder, RULES, DOCUMENT)
    with find(folder, RULES, DOCUMENT, TURN) as hit:
        assert (hit.num_segments, hit.end) == (2, 340)
        assert hit.miss == FileMiss(FileMissReason.NONE_STORED)
        assert hit.source_ids == ("doc",)


def test_it_is_there_after_a_restart_and_without_the_index(path):
    folder = open_folder(path)
    store(folder, RULES, source_ids=["a"])
    store(folder, RULES, DOCUMENT, source_ids=["b"])
    folder.pin(folder.list()[0].id)
    before = folder.list()
    folder.close()
    folder = open_folder(path)
    assert folder.list() == before
    folder.close()
    for name in path.glob("index.sqlite*"):
        name.unlink()
    folder = open_folder(path)
    assert folder.list() == before
    assert folder.counts().written_today_bytes == sum(info.size_bytes for info in before)
    assert is_stored(folder, RULES, DOCUMENT)
    folder.close()


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 1000])
def test_an_index_that_is_none_is_made_again(path, damage):
    folder = open_folder(path)
    store(folder, RULES)
    before = folder.list()
    folder.close()
    (path / "index.sqlite").write_bytes(damage)
    folder = open_folder(path)
    assert folder.list() == before
    folder.close()


def test_misses_say_why(folder):
    assert find(folder, RULES) == FileMiss(FileMissReason.NONE_STORED)
    assert find(folder) == FileMiss(FileMissReason.NONE_STORED)
    store(folder, RULES)
    assert find(folder, RULES[:-1]) == FileMiss(FileMissReason.PREFIX_DIFFERS)
    assert find(folder, RULES, namespace="other") == FileMiss(FileMissReason.NONE_STORED)
    store(folder, RULES, DOCUMENT)
    with find(folder, RULES, TURN) as hit:
        assert hit.miss == FileMiss(FileMissReason.PREFIX_DIFFERS)


@pytest.mark.parametrize(
    "name", [f.name for f in fields(IDENTITY) if f.name not in {"drafter", "mtp"}]
)
def test_each_field_of_the_identity_alone_misses_and_is_named(folder, name):
    store(folder, RULES)
    former = getattr(IDENTITY, name)
    other = replace(IDENTITY, **{name: former + 1 if isinstance(former, int) else former + "x"})
    miss = find(folder, RULES, identity=other)
    assert miss == FileMiss(FileMissReason.IDENTITY_DIFFERS, name)
    assert str(miss) == f"identity_differs:{name}"
    assert is_stored(folder, RULES)
    assert store(folder, RULES, identity=other) is None  # both are kept
    assert is_stored(folder, RULES, identity=other)
    assert is_stored(folder, RULES)


@pytest.mark.parametrize("name", ["drafter", "mtp"])
def test_another_drafter_costs_its_own_part_alone(folder, name):
    parts = (PartItem("drafter", 10), PartItem("mtp", 20), PartItem("lookup", 30))
    store(folder, RULES, items=parts)
    with find(folder, RULES, identity=replace(IDENTITY, **{name: "other"})) as hit:
        assert hit.miss is None
        misses = {part.name for part in parts if isinstance(hit.part(part.name), FileMiss)}
        assert misses == {name}
        assert hit.part(name) == FileMiss(FileMissReason.IDENTITY_DIFFERS, name)
        assert hit.part("none") == FileMiss(FileMissReason.NONE_STORED)
        (data,) = read(folder, [hit.part("lookup")])
        assert data == bytes_of(parts, (RULES,))[2]


def test_pages_of_later_segments_stand_for_those_of_earlier_ones(folder):
    exact, packed = PageForm.EXACT, PageForm.PACKED
    first = (PageItem(exact, 0, 40, 16), SnapshotItem(40, 1, 3), SnapshotItem(40, 0, 2))
    second = (PageItem(exact, 1, 84, 16), PageItem(exact, 0, 256, 16), PageItem(packed, 0, 256, 8))
    store(folder, RULES, items=first)
    store(folder, RULES, DOCUMENT, items=second)
    with find(folder, RULES, DOCUMENT) as hit:
        pages = hit.pages(exact)
        assert list(pages) == [0, 1]
        assert read(folder, pages.values()) == [
            bytes_of(second, (RULES, DOCUMENT))[at] for at in (1, 0)
        ]
        assert list(hit.pages(packed)) == [0]
        assert [stored.item for stored in hit.snapshots()[40]] == [first[2], first[1]]
    with find(folder, RULES) as hit:
        assert read(folder, hit.pages(exact).values()) == [bytes_of(first, (RULES,))[0]]


def test_origins_of_tokens_are_kept(folder):
    origins = array("I", [NO_SOURCE, 0, 0, 0, 7, 9, 0, 9, 12, 0, 0, 1])
    record = SegmentRecord(((1, 2, 3),), IDENTITY, "mine", ("doc",), (), 1.0, origins)
    assert folder.store(record, []) is None
    with find(folder, (1, 2, 3)) as hit:
        assert hit.files[0].tables.origins == origins
        assert hit.files[0].tables.tokens == array("I", [1, 2, 3])


def test_files_are_for_their_owner_alone_and_lie_in_a_folder_for_each_namespace(folder, path):
    for namespace in ("a", "b"):
        store(folder, RULES, namespace=namespace)
    store(folder, RULES, DOCUMENT, namespace="a")
    by_folder = sorted(len(list(found.glob("*.segment"))) for found in path.iterdir())
    assert by_folder[-2:] == [1, 2]
    for found in (path, *path.rglob("*")):
        mode = stat.S_IMODE(found.stat().st_mode)
        assert mode == (0o700 if found.is_dir() else 0o600), found
    for file in files_of(path):
        assert file.stat().st_size % layout.ALIGNMENT == 0


def test_items_can_be_read_past_the_page_cache(folder, path):
    store(folder, RULES)
    (name,) = files_of(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    with find(folder, RULES) as hit, mmap.mmap(-1, 8192) as memory:
        stored = hit.pages(PageForm.EXACT)[0]
        assert os.preadv(descriptor, [memory], stored.extent.offset) == 8192
        assert memory[:6000] == bytes_of(ITEMS, (RULES,))[0]
    os.close(descriptor)


def test_a_file_moved_to_another_namespace_is_not_read_there(path):
    folder = open_folder(path)
    store(folder, RULES, namespace="a")
    (moved,) = files_of(path)
    store(folder, TURN, namespace="b")
    (other,) = (file for file in files_of(path) if file != moved)
    moved.rename(other)
    assert find(folder, TURN, namespace="b").reason is FileMissReason.DAMAGED
    assert find(folder, TURN, namespace="b").reason is FileMissReason.NONE_STORED
    assert folder.counts().num_set_aside == 1
    folder.close()


def test_what_is_read_may_be_removed_meanwhile(folder, path):
    store(folder, RULES)
    with find(folder, RULES) as hit:
        folder.delete(folder.list()[0].id)
        assert files_of(path) == []
        stored = hit.pages(PageForm.EXACT)[0]
        assert read(folder, [stored]) == [bytes_of(ITEMS, (RULES,))[0]]
    assert find(folder, RULES).reason is FileMissReason.NONE_STORED


def test_items_land_in_pieces_of_any_memory(folder):
    items = [PageItem(PageForm.PACKED, index, 256, PIECE_BYTES + 5000) for index in range(3)]
    store(folder, RULES, items=items)
    with find(folder, RULES) as hit:
        pages = hit.pages(PageForm.PACKED)
        landings = {index: CopiedLanding(PIECE_BYTES + 5000) for index in pages}
        assert folder.read((pages[index], landings[index]) for index in pages) is None
    for index, data in enumerate(bytes_of(items, (RULES,))):
        pieces = sorted(landings[index].landed, key=lambda landed: landed[0].start)
        assert [at for at, _ in pieces] == [
            slice(0, PIECE_BYTES),
            slice(PIECE_BYTES, PIECE_BYTES + 5000),
        ]
        assert b"".join(piece for _, piece in pieces) == data


def test_an_error_of_the_caller_reaches_the_caller(folder):
    store(folder, RULES)
    landing = CopiedLanding(5999)
    with find(folder, RULES) as hit, pytest.raises(ValueError, match="5999 bytes for"):
        folder.read([(hit.pages(PageForm.EXACT)[0], landing)])
    assert landing.landed == []


READER = """
import sys
from pathlib import Path
from tests.processes import environment
from tests.sessions.samples import DOCUMENT, RULES, is_stored, open_folder, store

folder = open_folder(Path(sys.argv[1]))
print(folder.is_writable, is_stored(folder, RULES), store(folder, RULES, DOCUMENT).reason)
print([info.num_tokens for info in folder.list()], "torch" in sys.modules)
"""


def test_a_second_process_reads_and_does_not_write(path):
    writer = open_folder(path)
    store(writer, RULES)
    told = subprocess.run(
        [sys.executable, "-c", READER, str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.split("\n") == ["False True read_only", "[40] False", ""]
    reader = open_folder(path)
    assert not reader.is_writable
    store(writer, RULES, DOCUMENT)
    assert is_stored(reader, RULES, DOCUMENT)  # files are the truth, not what was there at first
    with pytest.raises(DataFolderLocked):
        reader.delete(reader.list()[0].id)
    reader.close()
    writer.close()
    successor = open_folder(path)
    assert successor.is_writable
    successor.close()


def test_a_damaged_file_is_no_hit_for_a_reader_and_stays(path):
    writer = open_folder(path)
    store(writer, RULES)
    (file,) = files_of(path)
    reader = open_folder(path)
    file.write_bytes(b"")
    for _ in range(2):
        assert find(reader, RULES).reason is FileMissReason.DAMAGED
    assert file.exists()
    reader.close()
    writer.close()


def test_a_file_of_another_version_is_removed_at_the_next_start(path, monkeypatch):
    monkeypatch.setattr(layout, "FORMAT_VERSION", 2)
    folder = open_folder(path)
    store(folder, RULES)
    monkeypatch.undo()
    miss = find(folder, RULES)
    assert str(miss) == "identity_differs:format_version"
    folder.close()
    folder = open_folder(path)
    assert files_of(path) == []
    assert folder.counts().num_set_aside == 0
    folder.close()


@pytest.mark.parametrize("session_id", ["", "zz", "00" * 32])
def test_an_id_that_is_none_is_not_found(folder, session_id):
    for method in (folder.delete, folder.pin, folder.unpin):
        with pytest.raises(NotFound):
            method(session_id)


@pytest.mark.parametrize(
    "change",
    [
        {"segments": ()},
        {"segments": (RULES, ())},
        {"prefill_seconds": float("nan")},
        {"prefill_seconds": -1.0},
        {"items": (SnapshotItem(1, 0, 0),)},
        {"origins": array("I", [1])},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(change):
    with pytest.raises(ValueError, match=r"."):
        replace(record_of(RULES), **change)


def test_names_and_identities_that_do_not_fit_are_refused():
    for name in ("", "n" * 17, "ä"):
        with pytest.raises(ValueError, match="a part named"):
            PartItem(name, 1)
    with pytest.raises(ValueError, match="hash them"):
        replace(IDENTITY, rope="x" * 4000)


@pytest.mark.parametrize(
    "buffers", [[], [b"12"], [b"123456"], [b"12345", b"6789"], [b"12345", b"678", b"9"], [b""]]
)
def test_buffers_that_do_not_match_leave_nothing(folder, path, buffers):
    record = record_of(RULES, items=[SnapshotItem(1, 0, 5), SnapshotItem(1, 1, 3)])
    with pytest.raises(ValueError, match=r"buffer of|more bytes"):
        folder.store(record, buffers)
    assert [file for file in path.rglob("*") if file.suffix in {".part", ".segment"}] == []
    assert folder.store(record, [b"1", b"2345", b"6", b"78"]) is None
    assert fetch(folder, RULES) == [b"12345", b"678"]


ITEM = st.one_of(
    st.builds(
        PageItem,
        st.sampled_from(PageForm),
        st.integers(0, 1 << 20),
        st.integers(1, 256),
        st.integers(1, 30_000),
    ),
    st.builds(SnapshotItem, st.integers(0, 1 << 40), st.integers(0, 300), st.integers(1, 30_000)),
    st.builds(PartItem, st.sampled_from(["drafter", "mtp", "lookup"]), st.integers(1, 30_000)),
)


@settings(max_examples=40)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2000).map(tuple),
    items=st.lists(ITEM, max_size=8),
    source_ids=st.lists(st.text(max_size=8), max_size=4, unique=True),
    namespace=st.text(max_size=20),
    block_pages=st.integers(1, 4),
)
def test_every_record_comes_back(
    tmp_path_factory, tokens, items, source_ids, namespace, block_pages
):
    path = tmp_path_factory.mktemp("round")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK_BYTES", block_pages * 4096)
        folder = open_folder(path)
        stored = store(
            folder, tokens, items=items, source_ids=source_ids, namespace=namespace, seconds=2.5
        )
    assert stored is None
    with find(folder, tokens, namespace=namespace) as hit:
        (file,) = hit.files
        assert tuple(file.tables.tokens) == tokens
        assert [extent.item for extent in file.tables.extents] == items
        assert hit.source_ids == tuple(source_ids)
        assert file.header.prefill_seconds == 2.5
        assert all(extent.offset % 4096 == 0 for extent in file.tables.extents)
    assert fetch(folder, tokens, namespace=namespace) == bytes_of(items, (tokens,))
    folder.close()
