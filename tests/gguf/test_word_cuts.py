"""Pieces of a text have the tokens of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash.gguf.pre_tokenizer import PRE_TOKENIZERS
from ragflash.gguf.word_cuts import cut_between_words, may_cut

LETTERS = ["word", "A", "don't", "it's", "é", "e\u0301", "漢", "'ll", "x y", "a b c", "🙂"]
OTHERS = [" ", "  ", "\n", "\n\n", "\t", ".", "!\n", "12", "'", " \n", "\u00a0", "\r\n"]
TEXTS = st.lists(st.sampled_from(LETTERS + OTHERS)).map("".join)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(text=TEXTS)
def test_words_are_cut_alike(name, text):
    recipe = PRE_TOKENIZERS[name].build()
    pieces = cut_between_words(text, 1)
    assert "".join(pieces) == text
    words = [word for piece in pieces for word, _ in recipe.pre_tokenize_str(piece)]
    assert words == [word for word, _ in recipe.pre_tokenize_str(text)]


def test_a_long_text_has_the_tokens_of_its_words(packaged_tokenizer):
    text = "Some words of a line, and 12 more.\n" * 3000
    assert len(cut_between_words(text)) > 4
    lines = [packaged_tokenizer.encode(line) for line in text.splitlines(keepends=True)]
    ids, starts = packaged_tokenizer.encode_with_offsets(text)
    assert ids == [token_id for line in lines for token_id in line]
    assert len(starts) == len(ids)
    assert packaged_tokenizer.decode(ids) == text


def test_what_is_taken_whole_is_not_cut():
    assert may_cut(["<|im_end|>", "  ", " the"])
    assert not may_cut(["New York"])
    assert cut_between_words("New York") == ["New York"]
    assert cut_between_words("") == [""]
