"""Byte-level vocabularies, trained here, against the tokenizer classes of transformers."""

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Trained
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from ragflash.gguf.byte_level import BYTE_OF_SYMBOL
from ragflash.gguf.tokenizer import Tokenizer

CORPUS = [
    golden["text"]
    for golden in json.loads(
        (Path(__file__).parents[1] / "golden" / "gemma3_tokens.json").read_text(encoding="utf-8")
    )
]
# Cuts that no model makes, so that merges exist across every boundary that a model does make.
COARSE = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r".{1,40}"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)

Encode = Callable[[str], Sequence[int]]


def train() -> tuple[dict[str, int], list[tuple[str, str]]]:
    trained = Trained(models.BPE())
    trained.pre_tokenizer = COARSE
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = [f"{n} in {n * n}, it's {n:05}; IT'S {1900 + n}" for n in range(300)]
    trained.train_from_iterator([*CORPUS * 3, *numbers], trainer)
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


VOCABULARY, MERGES = train()


class Llama3(TikTokenConverter):
    """Llama 3's converter, given the ranks instead of a file."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        return {
            bytes(BYTE_OF_SYMBOL[ord(symbol)] for symbol in token): rank
            for token, rank in VOCABULARY.items()
        }


def llama3() -> tuple[list[tuple[str, str]], Encode]:
    converter = Llama3()
    _, merges = converter.extract_vocab_merges_from_model(None)
    theirs = converter.converted()
    return merges, lambda text: theirs.encode(text, add_special_tokens=False).ids


def by_class(kind: type) -> tuple[list[tuple[str, str]], Encode]:
    theirs = kind(vocab=dict(VOCABULARY), merges=list(MERGES))
    return MERGES, lambda text: theirs.encode(
        text, add_special_tokens=False, split_special_tokens=True
    )


ORACLES: dict[str, Callable[[], tuple[list[tuple[str, str]], Encode]]] = {
    "gpt-2": lambda: by_class(GPT2Tokenizer),
    "qwen2": lambda: by_class(Qwen2Tokenizer),
    "qwen35": lambda: by_class(Qwen3_5Tokenizer),
    "llama-bpe": llama3,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Encode]]:
    import gguf

    from ragflash.gguf.reader import GGUFFile

    made = {}
    for pre, oracle in ORACLES.items():
        merges, theirs = oracle()
        path = tmp_path_factory.mktemp("oracle") / f"{pre}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(sorted(VOCABULARY, key=VOCABULARY.__getitem__))
        writer.add_token_types([TokenType.NORMAL] * len(VOCABULARY))
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        made[pre] = (Tokenizer.from_gguf(GGUFFile.open(path)), theirs)
    return made


@pytest.mark.parametrize("pre", ORACLES)
def test_ids_equal_those_of_transformers(
    pairs: dict[str, tuple[Tokenizer, Encode]], pre: str
) -> None:
    ours, theirs = pairs[pre]
    for line in CORPUS:
        # Qwen's files on the hub compose characters first; nothing in GGUF asks for it.
        text = unicodedata.normalize("NFC", line)
        assert ours.encode(text) == list(theirs(text)), text
        assert ours.decode(ours.encode(text)) == text


SNIPPETS = (
    *("it's", "IT'S", " ", "  ", "\n", "\r\n", "\t", "1", "1900", "½", "é", "हि", "漢", "👩\u200d"),
    *(".", "--", " (", "a", "Word", " the", "'", "_", "x\u0301", "\u00a0", "\u0e49", "<|x|>"),
)
mixed = st.lists(st.sampled_from(SNIPPETS), max_size=12).map(
    lambda parts: unicodedata.normalize("NFC", "".join(parts))
)


@given(text=mixed)
@pytest.mark.parametrize("pre", ORACLES)
def test_any_mixture_is_cut_alike(
    pairs: dict[str, tuple[Tokenizer, Encode]], pre: str, text: str
) -> None:
    ours, theirs = pairs[pre]
    assert ours.encode(text) == list(theirs(text))


def test_the_oracles_disagree_with_each_other(
    pairs: dict[str, tuple[Tokenizer, Encode]],
) -> None:
    cuts = {str([list(theirs(text)) for text in CORPUS]) for _, theirs in pairs.values()}
    assert len(cuts) == len(ORACLES)
