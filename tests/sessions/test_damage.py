"""Damage of any byte is found before the bytes are used, and costs that one file."""

import os
from pathlib import Path

import pytest

from ragflash.sessions import FileMiss, FileMissReason, SnapshotItem
from ragflash.sessions.disk import Disk
from ragflash.sessions.format import FOOTER_BYTES, HEADER_BYTES, SegmentUnusable
from ragflash.sessions.segment_file import SegmentFile
from tests.sessions.samples import (
    DOCUMENT,
    ITEMS,
    RULES,
    TURN,
    CopiedLanding,
    bytes_of,
    fetch,
    files_of,
    find,
    flip,
    is_stored,
    last_file,
    open_folder,
    read,
    store,
)


def is_sound(path: Path) -> bool:
    """Whether a file is opened, and all of it read, without an objection."""
    try:
        file = SegmentFile.open(Disk(), path)
    except SegmentUnusable as error:
        assert error.reason is FileMissReason.DAMAGED
        return False
    try:
        file.verify()
    except SegmentUnusable:
        return False
    finally:
        file.close()
    return True


def test_a_flip_of_any_byte_is_found(folder, path):
    store(folder, RULES, items=[SnapshotItem(40, 0, 3000)], source_ids=["a", "b"])
    (file,) = files_of(path)
    whole = file.read_bytes()
    assert len(whole) == HEADER_BYTES + 2 * 4096 + FOOTER_BYTES
    assert is_sound(file)
    descriptor = os.open(file, os.O_WRONLY)
    for at, byte in enumerate(whole):
        os.pwrite(descriptor, bytes([byte ^ 1 << at % 8]), at)
        assert not is_sound(file), at
        os.pwrite(descriptor, bytes([byte]), at)
    os.close(descriptor)
    assert is_sound(file)


@pytest.mark.parametrize("keep", [0, 1, 4095, 4096, 4097, 8192, -4097, -4096, -1])
def test_a_file_that_ends_too_early_or_is_zeros_from_there_is_found(folder, path, keep):
    store(folder, RULES)
    (file,) = files_of(path)
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert not is_sound(file)
    file.write_bytes(whole[:keep] + bytes(len(whole[keep:])))
    assert not is_sound(file) or keep == -1  # the last byte of a checksum may be zero
    file.write_bytes(whole + b"\0")
    assert not is_sound(file)


@pytest.mark.parametrize("where", ["header", "tables", "payload", "footer", "size", "empty"])
def test_a_damaged_file_is_set_aside_and_nothing_else_suffers(path, where):
    folder = open_folder(path)
    store(folder, RULES)
    (rules,) = files_of(path)
    store(folder, RULES, DOCUMENT)
    store(folder, TURN)
    size = rules.stat().st_size
    at = {"header": 100, "tables": 4100, "payload": 9000, "footer": size - 4090}
    if where in at:
        flip(rules, at[where], 3)
    else:
        os.truncate(rules, size - 1 if where == "size" else 0)
    found = fetch(folder, RULES)
    assert isinstance(found, FileMiss)
    assert found.reason is FileMissReason.DAMAGED
    assert not rules.exists()
    assert [found.name[:64] for found in (path / "quarantine").iterdir()] == [rules.stem]
    counts = folder.counts()
    assert (counts.num_segments, counts.num_set_aside) == (2, 1)
    assert find(folder, RULES, DOCUMENT).reason is FileMissReason.PREFIX_DIFFERS  # from TURN
    assert is_stored(folder, TURN)
    assert store(folder, RULES) is None
    assert is_stored(folder, RULES, DOCUMENT)  # it was not harmed, and has its beginning again
    folder.close()
    folder = open_folder(path)
    assert is_stored(folder, RULES, DOCUMENT)
    folder.close()


def test_what_has_landed_is_sound_and_what_has_not_is_forgotten(folder, path):
    store(folder, RULES)
    (file,) = files_of(path)
    with find(folder, RULES) as hit:
        items = last_file(hit)
        flip(file, items[2].extent.offset + 17, 0)
        landings = [CopiedLanding(stored.item.num_bytes) for stored in items]
        miss = folder.read(zip(items, landings, strict=True))
    assert miss.reason is FileMissReason.DAMAGED
    right = bytes_of(ITEMS, (RULES,))
    assert landings[2].landed == []
    for landing, data in zip(landings, right, strict=True):
        assert all(piece == data[at] for at, piece in landing.landed)


def test_verify_names_what_is_damaged_and_sets_it_aside(folder, path):
    store(folder, RULES)
    (file,) = files_of(path)
    store(folder, TURN)
    assert folder.verify() == ()
    flip(file, 9000, 5)
    assert folder.verify() == (file.stem,)
    assert folder.verify() == ()
    assert [info.num_tokens for info in folder.list()] == [len(TURN)]


def test_damage_is_found_at_the_start_where_headers_are_read(path):
    folder = open_folder(path)
    store(folder, RULES)
    store(folder, TURN)
    folder.close()
    for name in path.glob("index.sqlite*"):
        name.unlink()
    flip(files_of(path)[0], 50, 0)
    (files_of(path)[1].parent / "no key.segment").write_bytes(b"something else")
    folder = open_folder(path)
    counts = folder.counts()
    assert (counts.num_segments, counts.num_set_aside) == (1, 2)
    folder.close()


def test_a_file_that_was_replaced_while_nobody_looked_is_read_again(path):
    folder = open_folder(path)
    store(folder, RULES)
    folder.close()
    (file,) = files_of(path)
    other = file.with_suffix(".other")
    other.write_bytes(file.read_bytes())
    flip(other, 100, 2)
    other.rename(file)
    folder = open_folder(path)
    assert (folder.list(), folder.counts().num_set_aside) == ([], 1)
    folder.close()


def test_a_file_that_was_stored_again_is_not_set_aside_for_the_former_one(folder, path):
    store(folder, RULES)
    (file,) = files_of(path)
    whole = file.read_bytes()
    with find(folder, RULES) as hit:
        flip(file, 9000, 5)
        file.rename(file.with_suffix(".old"))
        file.write_bytes(whole)
        assert read(folder, last_file(hit)).reason is FileMissReason.DAMAGED
    assert is_stored(folder, RULES)
