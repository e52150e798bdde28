"""DFlash 2's convolution and selector equal their formulas, written out value by value."""

import pytest
import torch

from ragflash.models.dflash.conv import DynamicConv
from ragflash.models.dflash.selector import PathSelector
from ragflash.models.linear import DenseLinear
from tests.models.dflash.drafters import (
    BLOCK,
    MASK,
    SECOND,
    load_toy,
    make_toy,
    sequence_after,
    values,
)

WIDTH, GROUP = 12, 4


def convolve(rows, base, projection, taps):
    """`base[tap][channel] + projection[tap][group] · own row`, times the row `tap` before."""
    out = torch.zeros_like(rows)
    groups = WIDTH // GROUP
    for t in range(len(rows)):
        for channel in range(WIDTH):
            for tap in range(min(taps, t + 1)):
                dynamic = projection[t, tap * groups + channel // GROUP]
                out[t, channel] += (base[tap, channel] + dynamic) * rows[t - tap, channel]
    return out


@pytest.mark.parametrize("num_rows", [1, 2, 6])
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convolution_around_a_part_of_a_layer(taps, num_rows):
    groups = WIDTH // GROUP
    base = values((2, taps, WIDTH), seed=1)
    matrix = values((2 * taps * groups, WIDTH), seed=2)
    rows = values((num_rows, WIDTH), seed=3)
    found = DynamicConv(base, DenseLinear(matrix), GROUP)(rows, torch.exp)
    dynamic = (rows @ matrix.t()).double()
    into, out_of = dynamic.split(taps * groups, dim=1)
    inside = convolve(rows.double(), base[0].double(), into, taps).exp()
    expected = convolve(inside, base[1].double(), out_of, taps)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def choose(pending, hidden, token_ids, logits, before, after, matrix):
    path, previous = [], pending
    for row, candidates, own in zip(hidden, token_ids, logits, strict=True):
        best, best_score = None, float("-inf")
        for candidate, logit in zip(candidates.tolist(), own.tolist(), strict=True):
            projected = [float(weights @ row) for weights in matrix]
            score = logit + sum(
                float(a) * w * float(b)
                for a, w, b in zip(before[previous], projected, after[candidate], strict=True)
            )
            if score > best_score:
                best, best_score = candidate, score
        path.append(best)
        previous = best
    return tuple(path)


@pytest.mark.parametrize("seed", range(5))
def test_selector_goes_left_to_right(seed):
    vocab_size, rank, width, slots, top_k = 40, 6, 10, 7, 5
    before, after = (values((vocab_size, rank), seed=seed + i).double() * 2 for i in (0, 50))
    matrix = values((rank, width), seed=seed + 100).double() * 2
    hidden = values((slots, width), seed=seed + 150).double()
    logits = values((slots, vocab_size), seed=seed + 200).double() * 4
    best = logits.topk(top_k + 2)
    selector = PathSelector(
        top_k,
        lambda ids: before[ids].float(),
        lambda ids: after[ids].float(),
        DenseLinear(matrix.float()),
    )
    constant = torch.arange(slots)[:, None].float()
    scores = best.values.float() - constant
    chosen = selector.choose(torch.tensor([3]), hidden.float(), best.indices, scores)
    found = tuple(chosen.tolist())
    considered = best.indices[:, :top_k], best.values[:, :top_k]
    assert found == choose(3, hidden, *considered, before, after, matrix)
    assert found != tuple(best.indices[:, 0].tolist())


def test_a_drafter_with_a_selector_returns_what_it_chose_among(tmp_path):
    toy = make_toy(second=True)
    sequence = sequence_after(load_toy(toy, tmp_path / "toy"), toy.features(20))
    found = sequence.draft(7, 20, BLOCK - 1, top_k=2)
    assert found.token_ids.shape == (BLOCK - 1, SECOND["selector_top_k"])
    held = zip(found.chain, found.token_ids.tolist(), strict=True)
    assert all(token in candidates for token, candidates in held)
    assert found.chain != tuple(found.token_ids[:, 0].tolist())
    rows = toy.hidden(toy.features(20), [7, *[MASK] * (BLOCK - 1)], 20)[None, 1:]
    with torch.inference_mode():
        chosen, candidates, _ = toy.model.propose(
            rows, torch.tensor([7]), lambda hidden: hidden @ toy.head.t(), 0.0
        )
    assert found.chain == tuple(chosen[0].tolist())
    assert found.token_ids.sort().values.tolist() == candidates[0].sort().values.tolist()
