"""Where in a fixed text a run of tokens occurs, and what follows it there.

A suffix array over the tokens, and a table of hashes that leads to all suffixes with three tokens.
Nothing is written after building, so that threads may share an index.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ragflash.speculative.lookup.block import TEXT_OFFSET, Block, IndexArrays, pack, unpack
from ragflash.speculative.lookup.suffix_array import build_suffix_array

TOKEN_BYTES = 4
GRAM = 3
"""Tokens that are hashed."""

_GRAM_BYTES = GRAM * TOKEN_BYTES
_UNSIGNED = 0xFFFFFFFF  # where what is negative comes after all that is not
_FEW = 32  # up to which Python is as fast as an array operation
_PAST_ALL_TOKENS = b"\xff" * TOKEN_BYTES


class Interval(NamedTuple):
    """Places `low` to `high` (exclusive) of a suffix array: where `length` tokens occur."""

    low: int
    high: int
    length: int

    @property
    def size(self) -> int:
        """Number of occurrences."""
        return self.high - self.low


class SourceIndex:
    """Finds runs of tokens of one source.

    An occurrence counts only where a token follows it, since it is what follows that is wanted.

    Args:
        block: Of an index that `build` made; a mapped file must stay as it is.

    Attributes:
        block: All of the index, see `lookup.block`.
        key: SHA-256 of the tokens.
        suffixes: Starts of the suffixes in their order `[n]`.
        common: Tokens that each has in common with the one before it `[n]`.

    Raises:
        IndexDamaged: The block is something else.
    """

    def __init__(self, block: Block) -> None:
        arrays = unpack(block)
        self.key = arrays.key
        self.suffixes, self.common = arrays.suffixes, arrays.common
        self.block = block
        self._num_tokens = len(arrays.suffixes)
        # Views give Python's own numbers, several times as fast as arrays give theirs.
        self._suffixes, self._common = self.suffixes.data, self.common.data
        self._buckets, self._lows = arrays.buckets.data, arrays.lows.data

    @classmethod
    def build(cls, token_ids: Sequence[int] | NDArray[np.integer]) -> Self:
        """Index a source.

        Raises:
            ValueError: An id is not in 0 … 2^31 - 1, or there are 2^31 tokens or more.
        """
        text = as_text(token_ids)
        suffixes, common = build_suffix_array(text)
        buckets, lows = _hashed(text, suffixes, common)
        return cls(pack(IndexArrays(key_of(text), text, suffixes, common, buckets, lows)))

    def __len__(self) -> int:
        """Count the tokens of the source."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return len(self.block)

    def tokens(self, start: int, count: int) -> tuple[int, ...]:
        """Return tokens of the source, fewer at its end."""
        taken = self._text(start, min(start + count, self._num_tokens))
        return struct.unpack(f">{len(taken) // TOKEN_BYTES}I", taken)

    def find(self, pattern: bytes) -> Interval | None:
        """Find where `GRAM` tokens or more, given by `encode`, occur and go on."""
        low = self._first(pattern)
        return None if low is None else self._interval(low, pattern)

    def longest(self, tail: bytes, least: int, most: int) -> tuple[int, Interval] | None:
        """Find the longest end of `tail`, of `least` to `most` tokens, that occurs and goes on.

        Few occurrences are looked at one by one. Of many the length is bisected, as a shorter end
        occurs wherever a longer one does.

        Returns:
            How many tokens it has, and where they occur, or as many of their last ones as it says.
        """
        low = self._first(_last(tail, least)) if most >= least else None
        if low is None:
            return None
        high = self._near_end(low, least)
        if high is None:
            return self._bisected(low, tail, least, most)
        interval = Interval(low, high, least)
        length, only = self._most_before(interval, tail, most)
        if length == least:
            return length, interval
        if only is not None:
            return length, Interval(only, only + 1, least)
        found = self.find(_last(tail, length))
        assert found is not None
        return length, found

    def stretch(self, interval: Interval, most: int) -> Interval:
        """Lengthen by what all occurrences go on with, to `most` tokens in all.

        Returns:
            Those that the source does not end before; of fewer tokens only where they differ next.
        """
        low, high, length = interval
        agreed = most if low + 1 == high else min(most, self._least_common(low, high))
        if agreed == most or self._suffixes[low] + agreed < self._num_tokens:
            return Interval(low, high, agreed)
        return self.stretch(Interval(low + 1, high, length), most)

    def split(self, interval: Interval) -> list[int]:
        """Return where the runs of occurrences that go on with one token begin, and the last ends.

        They are in the order of the tokens.
        """
        low, high, length = interval
        if high - low <= _FEW:
            cuts = [at for at in range(low + 1, high) if self._common[at] == length]
        else:
            cuts = (np.flatnonzero(self.common[low + 1 : high] == length) + (low + 1)).tolist()
        return [low, *cuts, high]

    def next_start(self, low: int, high: int, start: int) -> int:
        """Return the first start of some suffixes at or after `start`, else the first of all."""
        if high - low == 1:
            return self._suffixes[low]
        if high - low <= _FEW:
            away = min([there - start & _UNSIGNED for there in self._suffixes[low:high]])
        else:
            away = int((self.suffixes[low:high] - np.int32(start)).view(np.uint32).min())
        return away + start & _UNSIGNED

    def _most_before(self, few: Interval, tail: bytes, most: int) -> tuple[int, int | None]:
        """Return how many tokens to the end of some of a few occurrences are the last of `tail`.

        With it comes the place of that occurrence, if they are more than all have, and it is alone.
        """
        length, only = few.length, None
        for at, start in enumerate(self._suffixes[few.low : few.high], few.low):
            end = start + few.length
            if length < most and self._ends_with(end, _last(tail, length + 1)):
                length, only = _num_alike(self._text(max(0, end - most), end), tail), at
            elif only is not None and self._ends_with(end, _last(tail, length)):
                only = None
        return length, only

    def _bisected(self, low: int, tail: bytes, least: int, most: int) -> tuple[int, Interval]:
        length, absent, probe = least, most + 1, most
        while length + 1 < absent:
            found = self._first(_last(tail, probe))
            if found is None:
                absent = probe
            else:
                low, length = found, probe
            probe = min(2 * length, (length + absent) // 2)  # short ones are many
        return length, self._interval(low, _last(tail, length))

    def _least_common(self, low: int, high: int) -> int:
        """Return how many tokens two suffixes or more have in common."""
        if high - low <= _FEW:
            return min(self._common[low + 1 : high])
        return int(self.common[low + 1 : high].min())

    def _first(self, pattern: bytes) -> int | None:
        """Return the first suffix that starts with a pattern and is longer."""
        low, length = self._with_gram(pattern[:_GRAM_BYTES]), len(pattern) // TOKEN_BYTES
        if low is None:
            return None
        if length > GRAM:
            low = self._bound(low, pattern)
        if low < self._num_tokens and self._suffixes[low] + length == self._num_tokens:
            low += 1  # it is as long as the pattern, so it comes before all that go on
        if low == self._num_tokens:
            return None
        start = self._suffixes[low]
        return low if self._text(start, start + length) == pattern else None

    def _with_gram(self, gram: bytes) -> int | None:
        """Return the first suffix that starts with `GRAM` tokens."""
        bucket = int.from_bytes(gram, "big") % (len(self._buckets) - 1)
        for at in range(self._buckets[bucket], self._buckets[bucket + 1]):
            low = self._lows[at]
            start = self._suffixes[low]
            if self._text(start, start + GRAM) == gram:
                return low
        return None

    def _interval(self, low: int, pattern: bytes) -> Interval:
        """Return all suffixes with a pattern, of which `low` is the first that counts."""
        length = len(pattern) // TOKEN_BYTES
        high = self._near_end(low, length)
        if high is None:
            high = self._bound(low + _FEW, pattern + _PAST_ALL_TOKENS)
        return Interval(low, high, length)

    def _near_end(self, low: int, length: int) -> int | None:
        """Return where the suffixes end that begin as `low` does; `None` if they are not few."""
        near = self._common[low + 1 : low + 1 + _FEW]
        for high, common in enumerate(near, low + 1):
            if common < length:
                return high
        return self._num_tokens if len(near) < _FEW else None

    def _bound(self, low: int, pattern: bytes) -> int:
        """Return the first place from `low` on whose suffix does not come before a pattern.

        By steps that grow, and then halve, since it is near as a rule.
        """
        block, suffixes, size, num_tokens = self.block, self._suffixes, len(pattern), len(self)
        text_end = TEXT_OFFSET + num_tokens * TOKEN_BYTES

        def head(start: int) -> bytes:
            at = TEXT_OFFSET + start * TOKEN_BYTES
            return block[at : min(at + size, text_end)]

        step, high = 1, low
        while high < num_tokens and head(suffixes[high]) < pattern:
            low, high, step = high + 1, high + step, 8 * step
        return bisect_left(suffixes, pattern, low, min(high, num_tokens), key=head)

    def _ends_with(self, end: int, pattern: bytes) -> bool:
        """Whether a pattern stands before a token of the source."""
        start = end - len(pattern) // TOKEN_BYTES
        return start >= 0 and self._text(start, end) == pattern

    def _text(self, start: int, end: int) -> bytes:
        """Return the bytes of tokens of the source; `end` is not past its own."""
        return self.block[TEXT_OFFSET + start * TOKEN_BYTES : TEXT_OFFSET + end * TOKEN_BYTES]


def distance(start: int, there: int) -> int:
    """Order places by how far they are behind `start`, those before it after all others."""
    return there - start & _UNSIGNED


def encode(token_ids: Sequence[int]) -> bytes:
    """Return tokens as an index holds them; their bytes compare as they do."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def as_text(token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return tokens as an index holds them, as an array `[n]`.

    Raises:
        ValueError: An id is not in 0 … 2^31 - 1, or there are 2^31 tokens or more.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    if len(tokens) >= 2**31 or not ((tokens >= 0) & (tokens < 2**31)).all():
        raise ValueError("an index is of fewer than 2^31 tokens, of ids from 0 to 2^31 - 1")
    return tokens.astype(">u4")


def key_of(text: NDArray[np.uint32]) -> bytes:
    """Return what names an index: SHA-256 of `as_text`."""
    return hashlib.sha256(text.data).digest()


def _last(tail: bytes, num_tokens: int) -> bytes:
    return tail[len(tail) - num_tokens * TOKEN_BYTES :]


def _num_alike(one: bytes, other: bytes) -> int:
    """Count the tokens that two runs have in common at the end; the first is no longer."""
    differing = int.from_bytes(one, "big") ^ int.from_bytes(other[len(other) - len(one) :], "big")
    num_bytes = ((differing & -differing).bit_length() - 1) // 8 if differing else len(one)
    return num_bytes // TOKEN_BYTES


def _hashed(
    tokens: NDArray[np.uint32], suffixes: NDArray[np.int32], common: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Map hashes of the first tokens to the first suffixes with them.

    Returns:
        Where each hash begins in the second array, and where the last one ends; and places in the
        suffix array, by hash. A hash is the bytes of the tokens as one number, modulo how many
        hashes there are.
    """
    lows = np.flatnonzero((common < GRAM) & (suffixes <= len(tokens) - GRAM))
    num_buckets = len(tokens) // 2 | 1
    hashes = np.zeros(len(lows), dtype=np.uint64)
    for place in range(GRAM):
        taken = tokens[suffixes[lows] + place].astype(np.uint64)
        hashes += taken * np.uint64((1 << 8 * TOKEN_BYTES * (GRAM - 1 - place)) % num_buckets)
        hashes %= np.uint64(num_buckets)
    order = np.argsort(hashes, kind="stable")
    edges = np.arange(num_buckets + 1, dtype=np.uint64)
    buckets = np.searchsorted(hashes[order], edges)
    return buckets.astype(np.int32), lows[order].astype(np.int32)
