"""Gemma 3 270M against what transformers and llama.cpp computed of its weights.

Its text is longer than the window of its local layers.
"""

import pytest

from ragflash.models.contract import Model
from tests.models.goldens import (
    assert_golden_logits,
    greedy_together,
    load_golden,
    load_real,
    perplexity,
)

GOLDEN = load_golden("gemma3_logits.json")
PEER = load_golden("llama_cpp.json")["gemma3"]


@pytest.fixture(scope="module")
def model(gemma_model_path) -> Model:
    return load_real(gemma_model_path)


def test_logits_equal_the_golden_ones(model):
    assert len(GOLDEN["ids"]) > 512
    assert_golden_logits(model, GOLDEN)


def test_greedy_tokens_of_two_prompts_together_equal_the_golden_ones(model):
    assert greedy_together(model, GOLDEN) == [case["tokens"] for case in GOLDEN["greedy"]]


def test_perplexity_is_that_of_llama_cpp(model):
    found = perplexity(model, PEER["ids"])
    assert found == pytest.approx(PEER["perplexity"], rel=0.005)
