"""Which tokens are markup and where they are found."""

import re

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st

from ragflash.gguf.vocabulary import MarkupFinder, Vocabulary

TOKENS = ["<a>", "<a><b>", "<b>", "[x]", "]", "^-", "<a>x"]
ALTERNATIVES = re.compile("|".join(map(re.escape, sorted(TOKENS, key=len, reverse=True))))


@given(text=st.text(st.sampled_from("<>ab[x]^- "), max_size=40))
def test_the_longest_token_is_found_from_the_left(text: str) -> None:
    runs = list(MarkupFinder(TOKENS).split(text))
    assert "".join(run for run, _ in runs) == text
    assert all(run for run, _ in runs)
    assert [run for run, is_token in runs if is_token] == ALTERNATIVES.findall(text)


@pytest.mark.parametrize("tokens", [[], [""]])
def test_without_tokens_a_text_is_one_run(tokens: list[str]) -> None:
    assert list(MarkupFinder(tokens).split("<a>")) == [("<a>", False)]
    assert list(MarkupFinder(tokens).split("")) == []


def test_tokens_are_sorted_by_what_may_turn_into_them() -> None:
    tokens = {
        "word": TokenType.NORMAL,
        "spare": TokenType.UNUSED,
        "<0x41>": TokenType.BYTE,
        "<unk>": TokenType.UNKNOWN,
        "<eos>": TokenType.CONTROL,
        "\n\n": TokenType.USER_DEFINED,
        "</h2>": TokenType.USER_DEFINED,
        "<think>": TokenType.USER_DEFINED,
        "<start_of_image>": TokenType.USER_DEFINED,
        "": TokenType.CONTROL,
    }
    vocabulary = Vocabulary(tuple(tokens), tuple(tokens.values()))
    assert vocabulary.merged == {"word": 0, "spare": 1}
    assert vocabulary.bytes == {"<0x41>": 2}
    assert vocabulary.atoms == {"\n\n": 5, "</h2>": 6}
    assert vocabulary.markup == {"<unk>": 3, "<eos>": 4, "<think>": 7, "<start_of_image>": 8}
