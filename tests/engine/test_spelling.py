"""Which tokens a text begins with, against a search of the whole vocabulary."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragflash.engine.constrain.spelling import NONE, Spellings

ALPHABET = st.sampled_from([b"a", b"b", "é".encode(), b"\xc3", b" "])
WORDS = st.lists(ALPHABET, max_size=5).map(b"".join)


@given(st.lists(WORDS, min_size=1, max_size=40), st.lists(ALPHABET, max_size=30).map(b"".join))
def test_all_tokens_that_a_text_begins_with_are_found_everywhere(vocabulary, text):
    if not any(vocabulary):
        return
    spellings = Spellings(vocabulary)
    data = np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(256))
    longest = spellings.longest(data, np.arange(len(data)))
    for at, token in enumerate(longest.tolist()):
        found = {*spellings.all_from(longest[at : at + 1]).tolist()}
        expected = {
            other
            for other, spelled in enumerate(vocabulary)
            if spelled and text[at:].startswith(spelled)
        }
        assert found == expected
        lengths = [len(vocabulary[other]) for other in expected]
        assert token == NONE if not expected else len(vocabulary[token]) == max(lengths)
    together = {*spellings.all_from(longest).tolist()}
    assert together == {
        token for token, spelled in enumerate(vocabulary) if spelled and spelled in text
    }


@given(st.lists(WORDS, min_size=1, max_size=20))
def test_bytes_that_are_tokens_are_known(vocabulary):
    if not any(vocabulary):
        return
    is_byte = Spellings(vocabulary).is_byte
    assert {*np.flatnonzero(is_byte).tolist()} == {word[0] for word in vocabulary if len(word) == 1}
