"""The packaged SmolLM2 against `golden/smollm2_logits.json`, which transformers computed."""

import pytest
import torch

from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.models.contract import Model
from tests.models.goldens import (
    all_logits,
    assert_golden_logits,
    forward,
    greedy_together,
    load_golden,
    load_real,
    perplexity,
)

GOLDEN = load_golden("smollm2_logits.json")
PEER = load_golden("llama_cpp.json")["smollm2"]


@pytest.fixture(scope="module")
def model(packaged_model_path) -> Model:
    return load_real(packaged_model_path)


def test_logits_equal_the_golden_ones(model):
    assert_golden_logits(model, GOLDEN)


def test_greedy_tokens_of_two_prompts_together_equal_the_golden_ones(model):
    assert greedy_together(model, GOLDEN) == [case["tokens"] for case in GOLDEN["greedy"]]


def test_perplexity_is_that_of_llama_cpp(model):
    found = perplexity(model, PEER["ids"])
    assert found == pytest.approx(PEER["perplexity"], rel=0.005)


def test_verifying_a_draft_gives_the_tokens_of_decoding(model):
    """One forward over the prompt and all golden tokens predicts each of them again."""
    case = GOLDEN["greedy"][0]
    rows = [*case["prompt"], *case["tokens"][:-1]]
    wanted = tuple(range(len(case["prompt"]) - 1, len(rows)))
    logits = forward(model, KVPages(PagePool(model.kv_layout, 3)), rows, 0, wanted)
    assert logits.argmax(-1).tolist() == case["tokens"]


def test_packed_weights_read_prompts_exactly_and_decode_nearly_so(packaged_model_path):
    packed = load_real(packaged_model_path, weights="packed")
    top_ids, exact = torch.tensor(GOLDEN["top_ids"]), torch.tensor(GOLDEN["top_logits"])
    prompt = all_logits(packed, GOLDEN["ids"]).gather(1, top_ids)
    torch.testing.assert_close(prompt, exact, rtol=0, atol=2e-3)
    pages = KVPages(PagePool(packed.kv_layout, 3))
    decoded = torch.cat(
        [
            forward(packed, pages, GOLDEN["ids"][start : start + 16], start, tuple(range(16)))
            for start in range(0, 192, 16)
        ]
    )
    assert (decoded.argmax(-1) == top_ids[:192, 0]).float().mean() > 0.95
    assert (decoded.gather(1, top_ids[:192]) - exact[:192]).abs().mean() < 0.1


@pytest.mark.slow
def test_bfloat16_agrees_in_most_tokens(packaged_model_path):
    logits = all_logits(load_real(packaged_model_path, dtype="bfloat16"), GOLDEN["ids"])
    agreement = logits.argmax(-1) == torch.tensor(GOLDEN["top_ids"])[:, 0]
    assert agreement.float().mean() > 0.9
