"""Suffix arrays with longest common prefixes, in whole-array operations.

Prefix doubling (Manber and Myers, "Suffix Arrays: A New Method for On-Line String Searches", 1993,
section 3): suffixes ranked by their first 2^j tokens are ranked by twice as many with one sort. The
ranks of all rounds are kept until the end, since two neighbours have 2^j tokens in common exactly
where their ranks of that round are equal: common prefixes are sums of such steps, longest first.
"""

import numpy as np
from numpy.typing import NDArray


def build_suffix_array(
    tokens: NDArray[np.integer],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sort the suffixes of a text; O(n log² n), also for periodic texts.

    Args:
        tokens: Ids `[n]`, below 2^31 of them.

    Returns:
        Where the suffixes start, in their order, and the number of tokens that each has in common
        with the one before it, 0 for the first; both `[n]`.
    """
    num_tokens = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    rounds: list[NDArray[np.int32]] = []
    while num_tokens and rank.max() < num_tokens:
        rounds.append(np.append(rank, 0).astype(np.int32))  # past the end comes before all tokens
        rank = _doubled(rank, 1 << (len(rounds) - 1))
    suffixes = np.empty(num_tokens, dtype=np.int64)
    suffixes[rank - 1] = np.arange(num_tokens)
    common = np.zeros(num_tokens, dtype=np.int64)
    here, there, length = suffixes[1:], suffixes[:-1], common[1:]
    for power in reversed(range(len(rounds))):
        agrees = rounds[power][here + length] == rounds[power][there + length]
        length += agrees.astype(np.int64) << power
    return suffixes.astype(np.int32), common.astype(np.int32)


def _doubled(rank: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Rank by twice `length` tokens; ranks start at 1, and equal suffixes share one."""
    key = rank * (len(rank) + 1)
    key[:-length] += rank[length:]
    order = np.argsort(key)
    ordered = key[order]
    doubled = np.empty_like(rank)
    doubled[order] = np.cumsum(np.append(True, ordered[1:] != ordered[:-1]))
    return doubled
