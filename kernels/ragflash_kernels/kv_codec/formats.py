"""Formats of cached keys and values, and how a page of them is laid out; no torch.

A page of one head is, for its T tokens of D values, in order: a low plane, a high plane (`TQ3_0`
only) and float16 scales. But for `TQ3_0` each is token after token, and where a byte holds two
values they lie far apart: byte b of a token's plane has values b and b + D / 2.

`TQ3_0` is laid out for matrix instructions (PTX ISA, `mma.m16n8k32` and `m16n8k16`): a thread
reads its fragments as they lie. Codes, a sign and two bits of a level, stand in groups of eight,
one for each nibble of a word. Word k of the low plane has in its nibbles the two level bits of
groups 2 k and 2 k + 1, word k of the high plane the signs of groups 4 k … 4 k + 3, the first one
lowest. What a group is, and in which order groups and scales stand, differs:

- keys: token after token, for c in 0 … 3, for each block b of 32 values: values 32 b + 8 c … + 7.
  Scales: token after token.
- values: for each TILE_TOKENS · n tokens (`value_tiles` is n), for each block b, for g in 0 … 7,
  for c in 0 … 3, for each tile u of the n, for m in 0, 1: values 32 b + 16 m + g and + 8 of tokens
  16 u + 2 c + (0, 1, 8, 9), the four tokens of the first value first. Scales: for each block b,
  each c, each u: of those four tokens.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod

ROTATION_VERSION = (
    1  # of `signs`: what was stored under other signs is unreadable, and no error says so
)
MAX_GROUP = 128
TILE_TOKENS = 16  # of a matrix instruction


class KvFormat(StrEnum):
    """How a value is stored.

    The `TQ` formats and `Q4_0` rotate groups of values first, which spreads outliers; `TQ` then
    take the nearest of 8 or 16 levels that are best for a normal distribution (Max 1960).
    """

    F16 = "f16"
    Q8_0 = "q8_0"  # 8.5 bits: a scale for 32
    Q4_0 = "q4_0"  # 4.5 bits: rotated, a scale for 32
    TQ4 = "tq4"  # 4.125 bits: rotated, a scale for a group
    TQ3_0 = "tq3_0"  # 3.5 bits: rotated, a scale for 32

    @property
    def rotated(self) -> bool:
        """Whether values are rotated before they are stored."""
        return self in {KvFormat.Q4_0, KvFormat.TQ4, KvFormat.TQ3_0}


LEVEL_UNITS = 1024  # levels are whole numbers of 1 / LEVEL_UNITS, so that their sums are exact
TQ3_LEVELS = (251, 774, 1376, 2204)  # of absolute values; the sign is a bit of its own
TQ3_EDGES = (0.5006, 1.0500, 1.7480)
TQ4_LEVELS = (131, 397, 673, 965, 1286, 1657, 2119, 2798)
TQ4_EDGES = (0.2582, 0.5224, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008)
AMPLITUDE_UNITS = 2048  # a block's largest amplitude, when sums over the block are taken
FIT_ROUNDS = 3  # of choosing levels and fitting the scale; one alone leaves 8 % more square error
LARGEST_HALF = 65504.0
SMALLEST_AMPLITUDE = 2.0**-100  # a block below it counts as zero, so that its inverse is finite


@dataclass(frozen=True)
class PageLayout:
    """Bytes of one head's page, and where its planes begin; the low plane is at 0."""

    high: int
    scales: int
    size: int


def rotation_group(head_dim: int) -> int:
    """Return how many neighbours are rotated together."""
    return min(MAX_GROUP, head_dim)


def scale_block(kv_format: KvFormat, head_dim: int) -> int:
    """Return how many neighbours share a scale."""
    return rotation_group(head_dim) if kv_format is KvFormat.TQ4 else 32


def value_tiles(page_tokens: int) -> int:
    """Return how many tiles of `TQ3_0` values stand together: 4, 2, or 0 where none do.

    A page of values has a multiple of 32 tokens.
    """
    return {0: 4, 32: 2}.get(page_tokens % 64, 0)


def page_layout(kv_format: KvFormat, page_tokens: int, head_dim: int) -> PageLayout:
    """Return the layout of a page of one head; head_dim is a multiple of 32."""
    low_bits = {KvFormat.F16: 16, KvFormat.Q8_0: 8, KvFormat.TQ3_0: 2}.get(kv_format, 4)
    high = page_tokens * head_dim * low_bits // 8
    scales = high + (page_tokens * head_dim // 8 if kv_format is KvFormat.TQ3_0 else 0)
    if kv_format is KvFormat.F16:
        return PageLayout(high, high, high)
    num_scales = page_tokens * head_dim // scale_block(kv_format, head_dim)
    return PageLayout(high, scales, scales + 2 * num_scales)


def cache_bytes(
    kv_format: KvFormat, *, layers: int, kv_heads: int, head_dim: int, tokens: int
) -> int:
    """Return what keys, or values, of so many tokens take."""
    return page_layout(kv_format, tokens, head_dim).size * prod((layers, kv_heads))


def signs(which: int, length: int) -> tuple[int, ...]:
    """Return fixed signs, 1 or -1: sign vector 0 or 1 of the rotation.

    The top bits of SplitMix64 (Steele et al. 2014) of `2 i + which`.
    """
    mask = 2**64 - 1
    found = []
    for i in range(length):
        z = ((2 * i + which) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        found.append(-1 if (z ^ z >> 31) >> 63 else 1)
    return tuple(found)
