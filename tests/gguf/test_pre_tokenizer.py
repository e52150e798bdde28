"""How each named pre-tokenizer cuts text into words; the byte-level alphabet is undone."""

import pytest

from ragflash.gguf.byte_level import BYTE_OF_SYMBOL
from ragflash.gguf.pre_tokenizer import PRE_TOKENIZERS


def words(name: str, text: str) -> list[str]:
    cut = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    return [bytes(BYTE_OF_SYMBOL[ord(c)] for c in word).decode() for word, _ in cut]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", ["", "It's 26.\r\n\r\n  Ünïc\t漢字 🎉", " \n \n a", "a  b   "])
def test_nothing_is_lost_or_added(name: str, text: str) -> None:
    assert "".join(words(name, text)) == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " IT", "'", "S", " 12345", "x"]),
        ("default", ["It", "'s", " IT", "'", "S", " 12345", "x"]),
        ("smollm", ["It", "'s", " IT", "'", "S", " ", "1", "2", "3", "4", "5", "x"]),
        ("qwen2", ["It", "'s", " IT", "'S", " ", "1", "2", "3", "4", "5", "x"]),
        ("qwen35", ["It", "'s", " IT", "'S", " ", "1", "2", "3", "4", "5", "x"]),
        ("llama-bpe", ["It", "'s", " IT", "'S", " ", "123", "45", "x"]),
    ],
)
def test_contractions_and_digits(name: str, expected: list[str]) -> None:
    assert words(name, "It's IT'S 12345x") == expected


@pytest.mark.parametrize("name", ["qwen2", "qwen35", "llama-bpe"])
def test_line_breaks_join_punctuation_and_blanks(name: str) -> None:
    assert words(name, "end.\n\n  next (x)\n") == ["end", ".\n\n", " ", " next", " (", "x", ")\n"]


def test_combining_marks_belong_to_words_in_qwen35_only() -> None:
    text = "ne\u0301e हिन्दी"
    assert words("qwen35", text) == ["ne\u0301e", " हिन्दी"]
    assert words("qwen2", text)[:3] == ["ne", "\u0301e", " ह"]


def test_only_llama_takes_whole_words_and_adds_bos() -> None:
    assert {name for name, recipe in PRE_TOKENIZERS.items() if recipe.ignore_merges} == {
        "llama-bpe",
        "llama3",
    }
    assert {name for name, recipe in PRE_TOKENIZERS.items() if recipe.add_bos} == {
        "llama-bpe",
        "llama3",
    }
