"""What is said of steps, and that forwards are noted; kernels are counted on a card only."""

import logging
from collections import Counter

import pytest

from ragflash.bench.gpu_profile import Call, Kernels, noted_forwards, tell
from ragflash.models.device.model import DeviceModel
from tests.models.forwards import batch_of
from tests.models.programmes import make_pair


def test_forwards_of_both_kinds_are_noted(tmp_path):
    pair = make_pair("llama", tmp_path)
    before = DeviceModel.forward
    with noted_forwards() as calls:
        logits = pair.programme.forward(batch_of([1, 2, 3], 0), pair.pages)
        pair.programme.commit(0, range(3))
        tokens = pair.programme.forward_greedy(batch_of([4], 3), pair.pages, goes_on=True)
    pair.programme.forward(batch_of([4], 3), pair.pages)
    assert len(logits) == 3
    assert len(tokens) == 1
    assert [call.num_rows for call in calls] == [3, 1]
    assert all(call.begun < call.ended for call in calls)
    assert DeviceModel.forward is before


def test_a_part_of_the_work_is_told(caplog):
    caplog.set_level(logging.INFO)
    calls = [Call(0.0, 0.002, 1), Call(0.003, 0.006, 1), Call(0.006, 0.008, 1)]
    kernels = Kernels(30, 6.0, Counter({"small": 1.0, "large": 5.0}))
    tell("a token", 8.0, calls, kernels, 2)
    assert caplog.messages == [
        "a token: 4.000 ms by the clock",
        "  1.5 forwards of 1, 1, 1 … rows, medians 2.000 ms inside and 0.500 ms of the host "
        "between them",
        "  15 kernels and copies, 3.000 ms on the card when each is timed",
        "       2500.0 µs  large",
        "        500.0 µs  small",
    ]


@pytest.mark.gpu
def test_kernels_are_counted():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ones = torch.ones(1000, device="cuda")
    kernels = Kernels.of(lambda: [ones.add_(1) for _ in range(5)])
    assert kernels.launches == 5
    assert kernels.busy_ms > 0
