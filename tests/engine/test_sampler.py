import numpy as np
import pytest
import torch

from ragflash.engine.constrain.mask import TokenMask
from ragflash.engine.request import SamplingParams
from ragflash.engine.sampler import choose, draw, probabilities, uniform
from ragflash.errors import InputError

P = torch.tensor([0.4, 0.3, 0.2, 0.1])
NOTHING = np.empty(0, dtype=np.int64)


def transformed(prompt=(), output=(), mask=None, logits=None, **params):
    return probabilities(
        P.log() if logits is None else logits,
        SamplingParams(**{"temperature": 1.0, **params}),
        prompt_ids=np.array(prompt, dtype=np.int64),
        output=output,
        mask=mask,
    ).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.3}, [1, 0, 0, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_transforms(params, expected):
    assert transformed(**params) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-30},
        {"temperature": 100.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"temperature": 1e-30, "repetition_penalty": 0.01, "top_p": 1e-300, "min_p": 0.999},
        {"logit_bias": ((0, -100.0), (1, 100.0)), "top_k": 10**30},
    ],
)
def test_the_extremes_give_a_distribution(params):
    logits = torch.tensor([300.0, -300.0, 299.0, 0.0])
    p = transformed(prompt=[0, 1], output=[0, 2, 2], logits=logits, **params)
    assert sum(p) == pytest.approx(1.0)
    assert min(p) >= 0.0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-300},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"repetition_penalty": 1e-300},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"top_k": -1},
        {"presence_penalty": float("inf")},
        {"logit_bias": ((0, float("nan")),)},
    ],
)
def test_what_gives_none_is_refused(params):
    with pytest.raises(InputError, match=next(iter(params))):
        SamplingParams(**params)


def test_penalties_over_the_output_alone():
    logits = torch.tensor([1.0, 1.0, 1.0])
    p = transformed(
        prompt=[2], output=[0, 0, 1], logits=logits, presence_penalty=0.5, frequency_penalty=0.25
    )
    expected = torch.softmax(torch.tensor([0.0, 0.25, 1.0]), dim=0)
    assert p == pytest.approx(expected.tolist(), abs=1e-6)


def test_repetition_penalty_over_prompt_and_output_once_each():
    logits = torch.tensor([2.0, -1.0, 2.0, -1.0])
    p = transformed(prompt=[0, 1], output=[0, 0], logits=logits, repetition_penalty=2.0)
    expected = torch.softmax(torch.tensor([1.0, -2.0, 2.0, -1.0]), dim=0)
    assert p == pytest.approx(expected.tolist(), abs=1e-6)
    assert logits.tolist() == [2.0, -1.0, 2.0, -1.0]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (TokenMask(np.array([1, 3]), is_allow=True), [0, 0.75, 0, 0.25]),
        (TokenMask(np.array([0]), is_allow=False), [0, 3 / 6, 2 / 6, 1 / 6]),
    ],
)
def test_masks_before_temperature_and_cuts(mask, expected):
    assert transformed(mask=mask) == pytest.approx(expected, abs=1e-6)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, top_k=1)
        token = choose(
            P.log(), params, seed=1, position=1, prompt_ids=NOTHING, output=(), mask=mask
        )
        assert token == 1


def test_draws_never_hit_a_token_of_probability_zero():
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert [draw(p, u) for u in (0.0, 0.49999, 0.5, 1 - 2**-53)] == [1, 1, 3, 3]


def test_uniform_numbers_belong_to_seed_and_position():
    numbers = {uniform(seed, position) for seed in range(10) for position in range(10)}
    assert len(numbers) == 100
    assert uniform(3, 4) == uniform(3, 4)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert all(0 <= number < 1 for number in numbers)
