"""The packaged SmolLM2 against `golden/smollm2_logits.json`, which transformers computed."""

import json
from pathlib import Path

import pytest
import torch

from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import PagePool
from ragflash.models.contract import ForwardBatch, Model, SequenceRows
from ragflash.models.registry import load_model

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2_logits.json").read_text(encoding="utf-8")
)
PAGES = (2, 0)


def load(path: Path, dtype: str, weights: str = "dense") -> Model:
    with GGUFFile.open(path) as file:
        return load_model(file, dtype=dtype, weights=weights)


@pytest.fixture(scope="module")
def model(packaged_model_path) -> Model:
    return load(packaged_model_path, "float32")


def forward(model, pool, tokens, committed, logit_rows):
    rows = SequenceRows(0, len(tokens), committed, PAGES, logit_rows)
    positions = torch.arange(committed, committed + len(tokens))
    return model.forward(ForwardBatch(torch.tensor(tokens), positions, (rows,)), pool)


def all_logits(model):
    ids = GOLDEN["ids"]
    return forward(model, PagePool(model.kv_layout, 3), ids, 0, tuple(range(len(ids))))


def test_logits_equal_the_golden_ones(model):
    logits = all_logits(model)
    top_ids = torch.tensor(GOLDEN["top_ids"])
    assert torch.equal(logits.argmax(-1), top_ids[:, 0])
    found = torch.cat([logits.gather(1, top_ids), logits.logsumexp(-1, keepdim=True)], dim=1)
    golden = torch.cat(
        [torch.tensor(GOLDEN["top_logits"]), torch.tensor(GOLDEN["logsumexp"])[:, None]], dim=1
    )
    torch.testing.assert_close(found, golden, rtol=0, atol=2e-3)


def test_greedy_tokens_of_two_prompts_together_equal_the_golden_ones(model):
    cases = GOLDEN["greedy"]
    pool = PagePool(model.kv_layout, 2)
    new, committed, found = [case["prompt"] for case in cases], [0, 0], [[], []]
    for _ in cases[0]["tokens"]:
        batch = ForwardBatch(
            torch.tensor([token for tokens in new for token in tokens]),
            torch.cat([torch.arange(c, c + len(n)) for c, n in zip(committed, new, strict=True)]),
            tuple(
                SequenceRows(i, len(new[i]), committed[i], (i,), (len(new[i]) - 1,)) for i in (0, 1)
            ),
        )
        best = model.forward(batch, pool).argmax(-1).tolist()
        for i in (0, 1):
            committed[i] += len(new[i])
            new[i] = [best[i]]
            found[i].append(best[i])
    assert found == [case["tokens"] for case in cases]


def test_verifying_a_draft_gives_the_tokens_of_decoding(model):
    """One forward over the prompt and all golden tokens predicts each of them again."""
    case = GOLDEN["greedy"][0]
    rows = [*case["prompt"], *case["tokens"][:-1]]
    wanted = tuple(range(len(case["prompt"]) - 1, len(rows)))
    logits = forward(model, PagePool(model.kv_layout, 3), rows, 0, wanted)
    assert logits.argmax(-1).tolist() == case["tokens"]


def test_packed_weights_read_prompts_exactly_and_decode_nearly_so(packaged_model_path):
    packed = load(packaged_model_path, "float32", "packed")
    top_ids, exact = torch.tensor(GOLDEN["top_ids"]), torch.tensor(GOLDEN["top_logits"])
    prompt = all_logits(packed).gather(1, top_ids)
    torch.testing.assert_close(prompt, exact, rtol=0, atol=2e-3)
    pool = PagePool(packed.kv_layout, 3)
    decoded = torch.cat(
        [
            forward(packed, pool, GOLDEN["ids"][start : start + 16], start, tuple(range(16)))
            for start in range(0, 192, 16)
        ]
    )
    assert (decoded.argmax(-1) == top_ids[:192, 0]).float().mean() > 0.95
    assert (decoded.gather(1, top_ids[:192]) - exact[:192]).abs().mean() < 0.1


@pytest.mark.slow
def test_bfloat16_agrees_in_most_tokens(packaged_model_path):
    logits = all_logits(load(packaged_model_path, "bfloat16"))
    agreement = logits.argmax(-1) == torch.tensor(GOLDEN["top_ids"])[:, 0]
    assert agreement.float().mean() > 0.9
