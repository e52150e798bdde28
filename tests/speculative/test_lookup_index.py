"""The index of a source against a search by hand, also of texts that repeat themselves."""

import mmap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragflash.speculative.lookup.block import IndexDamaged
from ragflash.speculative.lookup.continuation import follow
from ragflash.speculative.lookup.source_index import GRAM, SourceIndex, encode
from ragflash.speculative.lookup.suffix_array import build_suffix_array

texts = st.lists(st.integers(0, 3), max_size=40)
PERIODIC = [
    [7] * 300,
    [1, 2] * 150,
    [*range(37)] * 9,
    [*[0] * 200, 1, *[0] * 200],
    [int(bit) for n in range(120) for bit in f"{n:b}"],
]


def common_length(a, b):
    return next(
        (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def occurrences(text, pattern):
    """Starts of the occurrences that a token follows."""
    size = len(pattern)
    return [at for at in range(len(text) - size) if text[at : at + size] == pattern]


def check_arrays(text):
    suffixes, common = build_suffix_array(np.asarray(text, dtype=np.int64))
    expected = sorted(range(len(text)), key=lambda at: text[at:])
    assert suffixes.tolist() == expected
    lengths = [common_length(text[a:], text[b:]) for a, b in pairwise(expected)]
    assert common.tolist() == ([0, *lengths] if text else [])


@given(texts)
def test_suffixes_are_sorted_and_know_what_they_have_in_common(text):
    check_arrays(text)


@pytest.mark.parametrize("text", PERIODIC)
def test_texts_that_repeat_themselves_are_sorted(text):
    check_arrays(text)


def check_places(index, found, text, tail):
    """See that what was found is where it occurs; return how many tokens it has."""
    length, interval = found
    starts = index.suffixes[interval.low : interval.high] - (length - interval.length)
    assert sorted(starts) == occurrences(text, tail[-length:])
    return length


@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), st.data())
@example([7] * 90, None)
def test_the_longest_end_is_found_with_all_its_occurrences(text, data):
    index = SourceIndex.build(text)
    if data is None:
        tail = [7] * 64
    else:
        start = data.draw(st.integers(0, len(text)))
        tail = [*data.draw(texts), *text[start : start + data.draw(st.integers(0, 70))]][-64:]
    lengths = [n for n in range(GRAM, len(tail) + 1) if occurrences(text, tail[-n:])]
    found = index.longest(encode(tail), GRAM, len(tail))
    if not lengths:
        assert found is None
        return
    length = check_places(index, found, text, tail)
    assert length == max(lengths)
    shorter = index.longest(encode(tail), GRAM, length - 1)
    assert (shorter is None) == (length == GRAM)
    if shorter is not None:
        assert check_places(index, shorter, text, tail) == length - 1
    assert index.longest(encode(tail), length + 1, len(tail)) is None


@pytest.mark.parametrize("length", [3, 4, 9, 30, 64])
def test_the_longest_end_is_found_among_many_places_and_few(length):
    rng = np.random.default_rng(length)
    text = [*rng.integers(0, 2, 1200).tolist(), *rng.integers(2, 14, 1200).tolist()]
    index = SourceIndex.build(text)
    for start in range(0, 2300, 50):
        tail = [99, *text[start : start + length]]
        found = index.longest(encode(tail), GRAM, len(tail))
        assert check_places(index, found, text, tail) == length


def choose(text, starts, length, place):
    """Return the groups of occurrences by next token, the preferred one first."""
    groups = {}
    for at in starts:
        groups.setdefault(text[at + length], []).append(at)
    return sorted(groups.values(), key=lambda group: (-len(group), away(text, group, place)))


def away(text, starts, place):
    return min((at - place) % len(text) for at in starts)


def nearest(text, starts, place):
    return min(starts, key=lambda at: (at - place) % len(text))


@given(st.lists(st.integers(0, 2), min_size=GRAM + 1, max_size=120), st.data())
def test_the_majority_is_followed_and_the_runner_up_branches_off(text, data):
    at = data.draw(st.integers(0, len(text) - GRAM - 1))
    length = data.draw(st.integers(GRAM, min(GRAM + 2, len(text) - at - 1)))
    width, place = data.draw(st.integers(1, 9)), data.draw(st.integers(0, len(text)))
    pattern = text[at : at + length]
    starts = occurrences(text, pattern)
    index = SourceIndex.build(text)
    chosen = follow(index, index.find(encode(pattern)), width, place)
    begin, depth = place - length, length
    while True:
        going = [at for at in starts if at + depth < len(text)]
        groups = choose(text, going, depth, begin) if depth < length + width and going else []
        if len(groups) != 1:
            break
        starts, depth = groups[0], depth + 1
    counts, behind = [len(group) for group in groups[:2]], length + width - depth
    share = max(1, behind * counts[1] // sum(counts)) if groups and behind > 1 else 0
    assert chosen.place == nearest(text, groups[0] if groups else starts, begin) + length
    assert chosen.num_agreeing == (counts[0] if groups else len(starts))
    if not share:
        assert chosen.branch is None
        return
    assert chosen.branch == (depth - length, nearest(text, groups[1], begin) + length, share)


@given(texts)
def test_a_block_is_read_back(text):
    index = SourceIndex.build(text)
    again = SourceIndex(index.block)
    assert again.key == index.key
    assert len(again) == len(text)
    assert list(again.tokens(0, len(text) + 1)) == text
    assert (again.suffixes == index.suffixes).all()
    assert again.common.tolist() == index.common.tolist()


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 1000, 5000])
def test_a_token_takes_at_most_18_bytes(num_tokens):
    for text in (np.arange(num_tokens), np.zeros(num_tokens)):
        assert len(SourceIndex.build(text).block) <= 18 * num_tokens + 128 + 5 * 64


def test_a_block_can_be_mapped_from_a_file(tmp_path):
    text = [*range(50), *range(50)]
    path = tmp_path / "index"
    path.write_bytes(SourceIndex.build(text).block)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    index = SourceIndex(mapped)
    assert index.find(encode([3, 4, 5])).size == 2
    assert not index.suffixes.flags.writeable


def test_every_damaged_byte_is_noticed():
    block = SourceIndex.build([*range(20), *range(10)]).block
    for at in range(len(block)):
        damaged = bytearray(block)
        damaged[at] ^= 1
        with pytest.raises(IndexDamaged):
            SourceIndex(bytes(damaged))


@pytest.mark.parametrize("num_bytes", [0, 10, 128, 191])
def test_a_block_that_was_cut_is_refused(num_bytes):
    with pytest.raises(IndexDamaged, match="bytes"):
        SourceIndex(SourceIndex.build([1, 2, 3]).block[:num_bytes])


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_ids_that_do_not_fit_are_refused(token_id):
    with pytest.raises(ValueError, match="2\\^31"):
        SourceIndex.build([1, token_id])
