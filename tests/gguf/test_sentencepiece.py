"""Vocabularies with blanks as `▁`: against SentencePiece, a naive merge loop, and transformers."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Trained
from tokenizers import models, trainers
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.llama.tokenization_llama import LlamaTokenizer

from ragflash.engine.text import IncrementalDecoder
from ragflash.errors import GGUFInvalid, SettingInvalid
from ragflash.gguf.tokenizer import Tokenizer

GOLDENS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "gemma3_tokens.json").read_text(encoding="utf-8")
)
CORPUS = [golden["text"] for golden in GOLDENS]
BYTES = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
CONTROLS = [(token, TokenType.CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<turn|>")]

any_text = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    st.sampled_from("aab  \n\t-=1'é漢한م\u0301👩\u200d🏽▁<>")
)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: ascii(golden["text"])[:40])
def test_ids_equal_those_of_sentencepiece(
    gemma_tokenizer: Tokenizer, golden: dict[str, Any]
) -> None:
    assert gemma_tokenizer.encode(golden["text"]) == golden["ids"]


def test_gemma_facts(gemma_tokenizer: Tokenizer) -> None:
    assert gemma_tokenizer.vocab_size == 262_144
    assert (gemma_tokenizer.bos_id, gemma_tokenizer.eos_id) == (2, 1)
    assert gemma_tokenizer.stop_ids == {1, 106}
    assert gemma_tokenizer.add_bos is True
    turn = "<bos><start_of_turn>user\nHi\n\n<end_of_turn>\n"
    assert gemma_tokenizer.encode_markup(turn) == [2, 105, 2364, 107, 10979, 108, 106, 107]
    assert not {2, 105, 106} & set(gemma_tokenizer.encode(turn))


@given(text=any_text)
def test_text_survives_the_round_trip(gemma_tokenizer: Tokenizer, text: str) -> None:
    ids, starts = gemma_tokenizer.encode_with_offsets(text)
    spelled = [gemma_tokenizer.token_bytes(token_id) for token_id in ids]
    assert b"".join(spelled) == text.encode()
    assert gemma_tokenizer.decode(ids) == text
    assert not any(map(gemma_tokenizer.is_control, ids))
    decoder = IncrementalDecoder()
    assert "".join(map(decoder.feed, spelled)) + decoder.finish() == text
    character_of_byte = [i for i, character in enumerate(text) for _ in character.encode()]
    position = 0
    for start, piece in zip(starts, spelled, strict=True):
        assert start == character_of_byte[position]
        position += len(piece)


def train(lines: Sequence[str], *, num_tokens: int = 500) -> tuple[list[str], list[str]]:
    """Tokens and merges, best first, of a small vocabulary over whole lines."""
    trained = Trained(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, show_progress=False)
    trained.train_from_iterator([line.replace(" ", "▁") for line in lines], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


@pytest.fixture
def scored(vocabulary_file: Any) -> tuple[Tokenizer, dict[str, float]]:
    tokens, _ = train(["ab abc abcabc aaaa aaab == ==== a  b    c", "déjà vu, déjà"], num_tokens=60)
    vocabulary = [*CONTROLS, *BYTES, *((token, TokenType.NORMAL) for token in tokens)]
    scores = [0.0] * (len(CONTROLS) + 256) + [-float(rank) for rank in range(len(tokens))]
    file = vocabulary_file(
        vocabulary, model="llama", scores=scores, add_space_prefix=False, bos_token_id=2
    )
    best = {token: -float(rank) for rank, token in enumerate(tokens)}
    return Tokenizer.from_gguf(file), best


@pytest.mark.parametrize("seed", range(40))
def test_the_best_scored_neighbours_merge_first(
    scored: tuple[Tokenizer, dict[str, float]], seed: int
) -> None:
    tokenizer, best = scored
    text = "".join("abc =déjàvu,"[(seed * 7 + i * (seed + 3)) % 12] * (i % 4) for i in range(30))
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-best[left + right], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in best
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)] == parts


@pytest.mark.parametrize("said", [{}, {"add_space_prefix": True}])
def test_a_prompt_opens_with_a_blank_where_the_model_wants_it(
    vocabulary_file: Any, said: dict[str, bool]
) -> None:
    tokens, merges = train(["so it is", "is it so", "it so is so"], num_tokens=30)
    vocabulary = [*CONTROLS, *BYTES, *((token, TokenType.NORMAL) for token in tokens)]
    scores = [-float(rank) for rank in range(len(vocabulary))]
    ours = Tokenizer.from_gguf(vocabulary_file(vocabulary, model="llama", scores=scores, **said))
    theirs = LlamaTokenizer(
        vocab={token: token_id for token_id, (token, _) in enumerate(vocabulary)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        bos_token="<bos>",
        eos_token="<eos>",
    )
    for text in ("so it is", "it", "so\nso"):
        assert ours.encode(text, opens=True) == theirs.encode(text, add_special_tokens=False)
        marked = f"<bos>{text}<eos>{text}"
        assert ours.encode_markup(marked, opens=True) == theirs.encode(
            marked, add_special_tokens=False
        )
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("", opens=True) == []
    assert ours.encode_markup("so<eos>", opens=True)[0] == ours.encode(" so")[0]


def test_characters_without_a_token_are_spelled_in_bytes(
    scored: tuple[Tokenizer, dict[str, float]],
) -> None:
    tokenizer, _ = scored
    spelled = [tokenizer.token_text(token_id) for token_id in tokenizer.encode("a漢")]
    assert spelled == ["a", "<0xE6>", "<0xBC>", "<0xA2>"]
    assert tokenizer.decode(tokenizer.encode("a漢")) == "a漢"


def test_the_spelling_of_a_byte_token_is_text(
    scored: tuple[Tokenizer, dict[str, float]],
) -> None:
    tokenizer, _ = scored
    assert tokenizer.decode(tokenizer.encode("<0x41><unk>")) == "<0x41><unk>"


@pytest.fixture
def listed(vocabulary_file: Any) -> tuple[Tokenizer, GemmaTokenizer]:
    """A vocabulary like Gemma 4's, and transformers' tokenizer with the same one."""
    tokens, merges = train(CORPUS, num_tokens=900)
    breaks = ["\n" * length for length in range(2, 12)]
    merges = [merge for merge in merges if "\n" not in merge]
    for length in range(2, 12):
        merges += ["\n" * cut + " " + "\n" * (length - cut) for cut in range(1, length)]
    tokens = [token for token in tokens if "\n" not in token] + ["\n", *breaks]
    vocabulary = [*CONTROLS, *BYTES, *((token, TokenType.NORMAL) for token in tokens)]
    file = vocabulary_file(vocabulary, model="gemma4", merges=merges, bos_token_id=2)
    theirs = GemmaTokenizer(
        vocab={token: token_id for token_id, (token, _) in enumerate(vocabulary)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    return Tokenizer.from_gguf(file), theirs


def test_listed_merges_give_the_ids_of_transformers(
    listed: tuple[Tokenizer, GemmaTokenizer],
) -> None:
    ours, theirs = listed
    for text in CORPUS:
        if not any(token in text for token, _ in CONTROLS):
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
            assert ours.decode(ours.encode(text)) == text
    assert ours.add_bos is True
    assert ours.stop_ids == {CONTROLS.index(("<turn|>", TokenType.CONTROL))}


def test_no_merge_makes_a_control_token(vocabulary_file: Any) -> None:
    tokens = [*CONTROLS, *BYTES, *((token, TokenType.NORMAL) for token in ("<turn", "|>"))]
    tokens += [(character, TokenType.NORMAL) for character in "<|>turn"]
    merges = ["< t", "<t u", "<tu r", "<tur n", "| >", "<turn |>"]
    tokens += [(token, TokenType.NORMAL) for token in ("<t", "<tu", "<tur")]
    file = vocabulary_file(tokens, model="gemma4", merges=merges)
    tokenizer = Tokenizer.from_gguf(file)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("<turn|>")] == ["<turn", "|>"]
    assert tokenizer.encode_markup("<turn|>") == [4]


NORMAL = [("a", TokenType.NORMAL)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": NORMAL, "scores": [0.0]}, GGUFInvalid, "no token for the byte 0x00"),
        ({"tokens": BYTES, "scores": [0.0]}, GGUFInvalid, "1 scores for 256 tokens"),
        ({"tokens": BYTES}, GGUFInvalid, "scores.*lacks this key"),
        ({"tokens": BYTES, "model": "gemma4"}, GGUFInvalid, "merges.*lacks this key"),
        (
            {"tokens": [*BYTES, *NORMAL], "model": "gemma4", "merges": ["a a"]},
            GGUFInvalid,
            "'a' 'a' is not of known tokens",
        ),
    ],
)
def test_a_broken_vocabulary_is_refused(
    vocabulary_file: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    file = vocabulary_file(**{"model": "llama", "add_space_prefix": False, **options})
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(file)


def test_there_are_no_words_to_cut(vocabulary_file: Any) -> None:
    file = vocabulary_file(BYTES, model="llama", scores=[0.0] * 256, add_space_prefix=False)
    with pytest.raises(SettingInvalid, match=r"pre_tokenizer = 'qwen2'.*leave it unset"):
        Tokenizer.from_gguf(file, pre_tokenizer="qwen2")
