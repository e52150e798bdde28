"""Token ids against transformers, against a naive merge loop, and back to text."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import example, given
from hypothesis import strategies as st

from ragflash.errors import GGUFInvalid, InputError, SettingInvalid, TokenizerUnknown
from ragflash.gguf.byte_level import BYTE_SYMBOLS
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer

GOLDENS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2_tokens.json").read_text(encoding="utf-8")
)
IM_START, IM_END, END_OF_TEXT = 1, 2, 0
# Bytes that SmolLM2's vocabulary has no token for: some controls, lead bytes of planes 4 to 11.
UNCOVERED = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")


def is_covered(text: str) -> bool:
    return UNCOVERED.isdisjoint(text.encode())


@pytest.fixture(scope="module")
def merge_ranks(packaged_file: GGUFFile) -> dict[tuple[str, ...], int]:
    merges = packaged_file.require_array("tokenizer.ggml.merges", str)
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


any_text = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    st.sampled_from("ab 1\n\t'é漢한م\u0301👩\u200d🏽<|im_end|>")
)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: ascii(golden["text"])[:40])
def test_ids_equal_those_of_transformers(
    packaged_tokenizer: Tokenizer, golden: dict[str, Any]
) -> None:
    assert packaged_tokenizer.encode(golden["text"]) == golden["ids"]
    assert packaged_tokenizer.encode_markup(golden["text"]) == golden["markup_ids"]


one_word = st.text("etaoinshrdluTHE", min_size=1) | st.text("漢字仮名é", min_size=1)


@given(word=one_word)
def test_a_word_is_merged_as_the_ranks_say(
    packaged_tokenizer: Tokenizer, merge_ranks: dict[tuple[str, ...], int], word: str
) -> None:
    parts = [BYTE_SYMBOLS[byte] for byte in word.encode()]
    while True:
        candidates = [
            (merge_ranks[pair], at)
            for at, pair in enumerate(pairwise(parts))
            if pair in merge_ranks
        ]
        if not candidates:
            break
        _, at = min(candidates)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = packaged_tokenizer.encode(word)
    assert [packaged_tokenizer.token_text(i) for i in ids] == parts


@given(text=any_text.filter(is_covered))
def test_text_survives_the_round_trip(packaged_tokenizer: Tokenizer, text: str) -> None:
    ids = packaged_tokenizer.encode(text)
    assert packaged_tokenizer.decode(ids) == text
    assert b"".join(map(packaged_tokenizer.token_bytes, ids)) == text.encode()


@given(text=any_text)
@example(text="a\x04b\U00050000c")
def test_offsets_are_the_characters_that_tokens_start_in(
    packaged_tokenizer: Tokenizer, text: str
) -> None:
    character_of_byte = [
        index
        for index, character in enumerate(text)
        for byte in character.encode()
        if byte not in UNCOVERED
    ]
    ids, starts = packaged_tokenizer.encode_with_offsets(text)
    assert ids == packaged_tokenizer.encode(text)
    expected, position = [], 0
    for token_id in ids:
        expected.append(character_of_byte[position])
        position += len(packaged_tokenizer.token_bytes(token_id))
    assert starts == expected == sorted(starts)


@given(before=any_text, after=any_text)
def test_no_text_turns_into_a_control_token(
    packaged_tokenizer: Tokenizer, before: str, after: str
) -> None:
    ids = packaged_tokenizer.encode(f"{before}<|im_end|>\n<|im_start|>system{after}")
    assert not any(map(packaged_tokenizer.is_control, ids))


def test_markup_takes_the_longest_control_token(tokenizer_file: Any) -> None:
    others = [("<x>", TokenType.CONTROL), ("<x><y>", TokenType.CONTROL), ("", TokenType.CONTROL)]
    tokenizer = Tokenizer.from_gguf(tokenizer_file(others=others))
    short, long = tokenizer.vocab_size - 3, tokenizer.vocab_size - 2
    assert tokenizer.encode_markup("<x><y><x>") == [long, short]


def test_user_defined_tokens_are_markup_that_is_shown(tokenizer_file: Any) -> None:
    tokenizer = Tokenizer.from_gguf(
        tokenizer_file(others=[("<é k>", TokenType.USER_DEFINED), ("<s>", TokenType.CONTROL)])
    )
    shown, hidden = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    assert tokenizer.encode_markup("<s><é k>") == [hidden, shown]
    assert shown not in tokenizer.encode("<é k>")
    assert (tokenizer.token_bytes(shown), tokenizer.token_bytes(hidden)) == ("<é k>".encode(), b"")
    assert (tokenizer.is_control(shown), tokenizer.is_control(hidden)) == (False, True)
    assert tokenizer.decode([hidden, shown]) == "<é k>"


def test_whole_words_beat_merges_where_the_recipe_says_so(tokenizer_file: Any) -> None:
    merges = ("a b", "b c", "ab c")
    others = [("cab", TokenType.NORMAL)]
    by_merges = Tokenizer.from_gguf(tokenizer_file(merges=merges, others=others))
    whole = Tokenizer.from_gguf(tokenizer_file(pre="llama-bpe", merges=merges, others=others))
    assert len(by_merges.encode("cab")) == 2
    assert whole.encode("cab") == [whole.vocab_size - 1]


def test_a_control_token_that_is_a_word_is_not_reached_by_text(tokenizer_file: Any) -> None:
    tokenizer = Tokenizer.from_gguf(
        tokenizer_file(pre="llama-bpe", others=[("STOP", TokenType.CONTROL)])
    )
    assert len(tokenizer.encode("STOP")) == 4
    assert tokenizer.encode_markup("STOP") == [tokenizer.vocab_size - 1]


def test_bytes_of_split_characters_are_raw(packaged_tokenizer: Tokenizer) -> None:
    ids = packaged_tokenizer.encode("𝔘")
    assert len(ids) > 1
    assert packaged_tokenizer.decode(ids[:1]) == "\ufffd"
    assert packaged_tokenizer.decode(ids) == "𝔘"


def test_packaged_tokenizer_facts(packaged_tokenizer: Tokenizer) -> None:
    assert packaged_tokenizer.vocab_size == 49_152
    assert (packaged_tokenizer.bos_id, packaged_tokenizer.eos_id) == (IM_START, IM_END)
    assert packaged_tokenizer.stop_ids == {END_OF_TEXT, IM_END}
    assert packaged_tokenizer.add_bos is False
    assert packaged_tokenizer.token_text(IM_END) == "<|im_end|>"


def test_stop_ids_are_named_or_spelled(tokenizer_file: Any) -> None:
    others = [(token, TokenType.CONTROL) for token in ("<a>", "<b>", "<|eot_id|>", "<c>")]
    settings = {"tokenizer.ggml.eos_token_id": 260, "tokenizer.ggml.eom_token_id": 261}
    tokenizer = Tokenizer.from_gguf(tokenizer_file(others=others, settings=settings))
    assert tokenizer.stop_ids == {260, 261, 262}
    assert tokenizer.bos_id is None


@pytest.mark.parametrize(
    ("pre", "settings", "expected"),
    [
        ("gpt-2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_the_file_decides_about_bos_before_the_recipe(
    tokenizer_file: Any, pre: str, settings: dict[str, bool], expected: bool
) -> None:
    assert Tokenizer.from_gguf(tokenizer_file(pre=pre, settings=settings)).add_bos is expected


def test_another_pre_tokenizer_may_be_chosen(tokenizer_file: Any) -> None:
    file = tokenizer_file(pre="somebody-elses", merges=("1 2", "12 3"))
    chosen = Tokenizer.from_gguf(file, pre_tokenizer="qwen2")
    assert len(chosen.encode("123")) == 3
    named = Tokenizer.from_gguf(tokenizer_file(pre="gpt-2", merges=("1 2", "12 3")))
    assert len(named.encode("123")) == 1
    again = Tokenizer.from_gguf(file, pre_tokenizer="llama-bpe")
    assert chosen.fingerprint != again.fingerprint


def test_a_chosen_pre_tokenizer_must_be_known(tokenizer_file: Any) -> None:
    with pytest.raises(SettingInvalid, match=r"'qwen3'.*gpt-2, llama-bpe"):
        Tokenizer.from_gguf(tokenizer_file(), pre_tokenizer="qwen3")


def test_white_space_and_tags_that_are_tokens_are_taken_whole(tokenizer_file: Any) -> None:
    others = [(token, TokenType.USER_DEFINED) for token in ("\n\n", "    ", "</td>", "<think>")]
    tokenizer = Tokenizer.from_gguf(tokenizer_file(others=others))
    breaks, blanks, tag, think = range(tokenizer.vocab_size - 4, tokenizer.vocab_size)
    ids = tokenizer.encode("a\n\n    b</td><think>")
    assert {breaks, blanks, tag} < set(ids)
    assert think not in ids
    assert tokenizer.decode(ids) == "a\n\n    b</td><think>"
    assert tokenizer.encode_markup("</td><think>") == [tag, think]


def test_fingerprint_changes_with_anything_that_ids_depend_on(tokenizer_file: Any) -> None:
    variants = [
        {},
        {"pre": "qwen2"},
        {"merges": ("h e",)},
        {"others": [("x y", TokenType.CONTROL)]},
        {"others": [("x y", TokenType.USER_DEFINED)]},
    ]
    prints = [Tokenizer.from_gguf(tokenizer_file(**variant)).fingerprint for variant in variants]
    assert len(set(prints)) == len(variants)
    again = tokenizer_file(settings={"tokenizer.chat_template": "x"})
    assert Tokenizer.from_gguf(again).fingerprint == prints[0]


def test_half_a_surrogate_pair_is_refused(packaged_tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="surrogate"):
        packaged_tokenizer.encode("a\ud83d")


@pytest.mark.parametrize("token_id", [-1, 49_152])
def test_an_unknown_id_is_an_index_error(packaged_tokenizer: Tokenizer, token_id: int) -> None:
    for ask in (
        packaged_tokenizer.token_bytes,
        packaged_tokenizer.token_text,
        packaged_tokenizer.is_control,
    ):
        with pytest.raises(IndexError):
            ask(token_id)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"pre": "x"},
            TokenizerUnknown,
            "'x'.*gpt-2, llama-bpe, llama3, qwen2, qwen35, smollm.*RAGFLASH_PRE_TOKENIZER",
        ),
        ({"pre": None}, TokenizerUnknown, "pre is None"),
        ({"model": "bert"}, TokenizerUnknown, "'bert'.*gpt2, llama, gemma4"),
        ({"merges": ("h e", "x y"), "unmade": ("x y",)}, GGUFInvalid, "'xy' is no text token"),
        ({"merges": ("he",)}, GGUFInvalid, "merges"),
        ({"without": "A"}, GGUFInvalid, "no token for the byte 0x41"),
        (
            {"settings": {"tokenizer.ggml.eos_token_id": 260}},
            GGUFInvalid,
            "eos_token_id.*260 is not below the 260 tokens",
        ),
    ],
)
def test_a_broken_vocabulary_is_refused(
    tokenizer_file: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(tokenizer_file(**options))
