"""What was written before is found again, also while it is being repeated."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from ragflash.speculative.lookup.output_index import MOST_PLACES, OutputIndex
from ragflash.speculative.lookup.source_index import GRAM


def recur(text, most):
    """Length, places and counts, by hand."""
    ends = [
        at
        for at in range(len(text) - 1, GRAM - 1, -1)
        if len(text) >= GRAM and text[at - GRAM : at] == text[-GRAM:]
    ][:MOST_PLACES]
    if not ends:
        return None

    def agreed(end):
        count = 0
        while count < min(most, end) and text[end - 1 - count] == text[-1 - count]:
            count += 1
        return count

    length = max(map(agreed, ends))
    best = [end for end in ends if agreed(end) == length]
    ranked = Counter(text[end] for end in best).most_common()
    places = tuple(next(end for end in best if text[end] == token) for token, _ in ranked)
    return length, places, tuple(count for _, count in ranked)


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12), st.integers(GRAM, 70))
@example([[5] * 100], 64)
@example([[0, 1] * 40, [2], [0, 1] * 40], 64)
def test_the_longest_recurrence_is_found_after_every_piece(pieces, most):
    index, text = OutputIndex(), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        found = index.longest(GRAM, most)
        expected = recur(text, most)
        assert (found and (found.length, found.places, found.counts)) == expected
        if found:
            assert index.longest(found.length, most) == found
            assert index.longest(found.length + 1, most) is None


def test_a_period_goes_on_past_the_end():
    index = OutputIndex()
    index.extend([9, 1, 2, 3, 1, 2, 3])
    found = index.longest(GRAM, 64)
    assert found.length == 3
    assert index.tokens(found.places[0], 7) == (1, 2, 3, 1, 2, 3, 1)


def test_few_tokens_recur_nowhere():
    index = OutputIndex()
    assert index.longest(GRAM, 64) is None
    index.extend([1, 1])
    assert index.longest(GRAM, 64) is None
