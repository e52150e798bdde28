"""How text is cut into words before byte-level BPE, by the name a GGUF file gives it.

The expressions are those of the models' own tokenizers, as `llama-vocab.cpp` of llama.cpp lists
them under the same names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN35 = (  # combining marks belong to words
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True)
class PreTokenizerRecipe:
    """What a pre-tokenizer's name stands for.

    Attributes:
        build: Makes the splitter.
        ignore_merges: A word that is a token is taken whole, whatever the merges say.
        add_bos: Whether a prompt begins with the BOS token where the file does not say.
    """

    build: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([Digits(individual_digits=True), _gpt2()])


def _by_expression(expression: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                Split(Regex(expression), behavior="isolated"),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


_QWEN2_RECIPE = PreTokenizerRecipe(_by_expression(_QWEN2))
_LLAMA3_RECIPE = PreTokenizerRecipe(_by_expression(_LLAMA3), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizerRecipe] = {
    "default": PreTokenizerRecipe(_gpt2),
    "deepseek-r1-qwen": _QWEN2_RECIPE,
    "gpt-2": PreTokenizerRecipe(_gpt2),
    "llama-bpe": _LLAMA3_RECIPE,
    "llama3": _LLAMA3_RECIPE,
    "qwen2": _QWEN2_RECIPE,
    "qwen35": PreTokenizerRecipe(_by_expression(_QWEN35)),
    "smollm": PreTokenizerRecipe(_smollm),
}
