"""From logits to the next token.

The one place where logits are transformed. Plain decoding, verification of drafts and constrained
decoding all call it for one row at a time, given exactly the tokens that were emitted before that
row.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from ragflash.engine.constrain.mask import Ids, TokenMask
from ragflash.engine.request import SamplingParams


def choose(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    prompt_ids: Ids,
    output: Sequence[int],
    mask: TokenMask | None = None,
) -> int:
    """Pick the next token of one sequence.

    Args:
        logits: `[V]` f32.
        params: How to pick.
        seed: Of the sequence.
        position: Of the token to pick; with `seed` it fixes the draw, whatever else runs beside.
        prompt_ids: Distinct tokens of the prompt, for the repetition penalty.
        output: Emitted tokens.
        mask: Which tokens may be picked.
    """
    if mask is not None and mask.only is not None:
        return mask.only
    if params.is_plain_greedy:
        return _largest(logits, mask)
    p = probabilities(logits, params, prompt_ids=prompt_ids, output=output, mask=mask)
    if params.temperature == 0.0:
        return int(p.argmax())
    return draw(p, uniform(seed, position))


def probabilities(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    prompt_ids: Ids,
    output: Sequence[int],
    mask: TokenMask | None = None,
) -> torch.Tensor:
    """Return the distribution `[V]` that the next token is drawn from.

    In order: penalties, bias, mask, temperature, top-k, top-p, min-p. At temperature 0 all weight
    is on the largest logit.
    """
    logits = _adjusted(logits, params, prompt_ids, output, mask)
    if params.temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    p = torch.softmax(logits / params.temperature, dim=-1)
    if params.top_k:
        p = _keep_top_k(p, params.top_k)
    if params.top_p < 1.0:
        p = _keep_top_p(p, params.top_p)
    if params.min_p > 0.0:
        p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    return p / p.sum()


def log_probabilities(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    prompt_ids: Ids,
    output: Sequence[int],
    mask: TokenMask | None = None,
) -> torch.Tensor:
    """Return `[V]` f64 in nats, of the distribution that temperature and cuts are applied to."""
    adjusted = _adjusted(logits, params, prompt_ids, output, mask)
    return torch.log_softmax(adjusted.double(), dim=-1)


def likeliest(logprobs: torch.Tensor, k: int) -> list[tuple[int, float]]:
    """Return the `k` likeliest tokens that are possible at all, likeliest first."""
    values, ids = torch.topk(logprobs, min(k, len(logprobs)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    possible = [pair for pair in pairs if pair[1] > -math.inf]
    return sorted(possible, key=lambda pair: (-pair[1], pair[0]))


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed and a position (Philox, Salmon et al. 2011)."""
    bits = np.random.Philox(key=seed % 2**64, counter=position)
    return float(np.random.Generator(bits).random())


def draw(p: torch.Tensor, u: float) -> int:
    """Return the first token whose cumulative probability exceeds `u`, never one of weight 0."""
    cumulative = p.double().cumsum(dim=-1)
    at = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    return min(at, int(p.nonzero()[-1]))


def _adjusted(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_ids: Ids,
    output: Sequence[int],
    mask: TokenMask | None,
) -> torch.Tensor:
    logits = logits.float()
    if params.has_penalties:
        logits = _penalise(logits, params, prompt_ids, output)
    if params.logit_bias:
        logits = _biased(logits, params.logit_bias)
    return logits if mask is None else _masked(logits, mask)


def _penalise(
    logits: torch.Tensor, params: SamplingParams, prompt_ids: Ids, output: Sequence[int]
) -> torch.Tensor:
    """Divide logits of seen tokens as CTRL does (Keskar et al. 2019), then subtract penalties."""
    logits = logits.clone()
    emitted, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.union1d(prompt_ids, emitted)).to(logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(emitted):
        amounts = params.presence_penalty + params.frequency_penalty * counts
        ids = torch.from_numpy(emitted).to(logits.device)
        logits[ids] -= torch.from_numpy(amounts).to(logits)
    return logits


def _biased(logits: torch.Tensor, bias: Sequence[tuple[int, float]]) -> torch.Tensor:
    ids = torch.tensor([token_id for token_id, _ in bias], device=logits.device)
    amounts = torch.tensor([amount for _, amount in bias], device=logits.device)
    return logits.index_add(0, ids, amounts.to(logits))


def _masked(logits: torch.Tensor, mask: TokenMask) -> torch.Tensor:
    ids = torch.from_numpy(mask.ids).to(logits.device)
    if not mask.is_allow:
        return logits.index_fill(0, ids, -torch.inf)
    masked = torch.full_like(logits, -torch.inf)
    masked[ids] = logits[ids]
    return masked


def _largest(logits: torch.Tensor, mask: TokenMask | None) -> int:
    if mask is None or (not mask.is_allow and len(mask.ids) == 0):
        return int(logits.argmax())
    if not mask.is_allow:
        return int(_masked(logits, mask).argmax())
    ids = torch.from_numpy(mask.ids).to(logits.device)
    return int(mask.ids[int(logits[ids].argmax())])


def _keep_top_k(p: torch.Tensor, k: int) -> torch.Tensor:
    kept, ids = torch.topk(p, min(k, len(p)))
    return torch.zeros_like(p).scatter(0, ids, kept)


def _keep_top_p(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most probable tokens that reaches `top_p` (Holtzman et al. 2020)."""
    values, ids = torch.sort(p, descending=True, stable=True)
    before = values.cumsum(dim=-1) - values
    total = float(values.sum())
    kept = before < top_p * total
    kept[0] = True  # also where `top_p` is 0 as an f32
    return torch.zeros_like(p).scatter(0, ids, torch.where(kept, values, 0.0))
