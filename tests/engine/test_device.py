"""What keeps a card from being used is said in words, with what to do; no card is needed here."""

import pytest
import torch

from ragflash.engine import device
from ragflash.engine.card import CardOptions, card_format, place_on_card
from ragflash.errors import DeviceMemoryShort, DeviceMissing, DeviceUnsupported, SettingInvalid
from ragflash.kvcache.planner import CONTEXT_BYTES, PlanOptions, plan_memory
from ragflash.models.known_formats import remember_format
from ragflash.models.shapes import model_shape, shape_file

GIB = 1 << 30
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version"
)


@pytest.fixture
def card(monkeypatch):
    """A card of 24 GiB of which 1 GiB is taken, by answers of `torch.cuda`."""
    answers = {
        "init": lambda: None,
        "get_device_capability": lambda: (8, 6),
        "get_device_name": lambda: "NVIDIA GeForce RTX 3090",
        "current_device": lambda: 0,
        "mem_get_info": lambda: (23 * GIB, 24 * GIB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return monkeypatch


@pytest.fixture
def plan():
    return plan_memory(model_shape(shape_file("qwen35-27b")), PlanOptions(24 * GIB, 138_696))


def fail(error):
    def raise_it(*args):
        raise error

    return raise_it


def test_a_card_that_can_be_used_is_taken_by_itself(card):
    assert device.choose_device("auto") == torch.device("cuda", 0)
    assert device.choose_device("cuda") == torch.device("cuda", 0)
    assert device.choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), DeviceMissing, "not compiled"),
        (RuntimeError("Found no NVIDIA driver on your system."), DeviceMissing, "no NVIDIA driver"),
        (RuntimeError("No CUDA GPUs are available"), DeviceMissing, "nvidia-smi"),
        (RuntimeError(TOO_OLD), DeviceUnsupported, "install a newer one"),
    ],
)
def test_without_a_card_auto_takes_the_processor_and_cuda_is_refused(card, error, kind, words):
    card.setattr(torch.cuda, "init", fail(error))
    assert device.choose_device("auto") == torch.device("cpu")
    with pytest.raises(kind, match=words) as caught:
        device.choose_device("cuda")
    assert "--device cpu" in caught.value.detail


def test_a_card_that_is_too_old_is_named(card):
    card.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    card.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(DeviceUnsupported, match=r"Tesla T4 has compute capability 7\.5, and 8\.0"):
        device.choose_device("cuda")
    assert device.choose_device("auto").type == "cpu"


def test_a_card_is_as_large_as_it_is_free_or_as_it_is_told(card):
    assert device.usable_bytes(None) == 23 * GIB + CONTEXT_BYTES
    assert device.usable_bytes(16 * GIB) == 16 * GIB
    with pytest.raises(DeviceMemoryShort, match="--vram 48 is more than the 24 GiB"):
        device.usable_bytes(48 * GIB)


def test_what_others_hold_is_not_planned_with(card):
    card.setattr(torch.cuda, "mem_get_info", lambda: (4 * GIB, 24 * GIB))
    assert device.usable_bytes(24 * GIB) == 4 * GIB + CONTEXT_BYTES


def test_the_allocator_ends_where_the_planned_card_does(card, plan):
    fractions = []
    card.setattr(torch.cuda, "mem_get_info", lambda: (140 * GIB, 141 * GIB))
    card.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    device.limit_allocator(plan)
    assert fractions[0] * 141 * GIB == pytest.approx(24 * GIB - CONTEXT_BYTES - GIB)


def test_running_out_of_memory_says_what_to_do(card, plan):
    card.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 24 * GIB))
    with (
        pytest.raises(DeviceMemoryShort, match=r"1\.00 of 24\.00 GiB are free.*--ctx") as caught,
        device.explained_memory(plan),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "qwen35-27b" in caught.value.detail
    with pytest.raises(ZeroDivisionError), device.explained_memory(plan):
        raise ZeroDivisionError


def test_an_unnamed_format_is_the_measured_one_or_q8_0(tmp_path):
    assert card_format("tq4", "a" * 64, None) == "tq4"
    assert card_format("auto", "a" * 64, tmp_path) == "q8_0"
    remember_format("a" * 64, "model.gguf", "tq3_0", tmp_path)
    assert card_format("auto", "a" * 64, tmp_path) == "tq3_0"


def test_a_file_that_is_larger_than_the_card_is_refused_before_it_is_read(card):
    card.setattr(torch.cuda, "mem_get_info", lambda: (15 * GIB, 16 * GIB))
    card.setattr("ragflash.engine.card.load_records", fail(AssertionError("it was read")))
    options = CardOptions(None, None, "tq3_0", max_slots=1, verify_rows=21)
    with pytest.raises(DeviceMemoryShort, match="a smaller model or quantisation"):
        place_on_card(shape_file("qwen35-27b"), torch.device("cuda", 0), options)


def test_no_more_rows_are_verified_than_a_tape_has_room_for():
    options = CardOptions(None, None, "tq3_0", max_slots=1, verify_rows=33)
    with pytest.raises(SettingInvalid, match="32 rows at most"):
        place_on_card(shape_file("qwen35-27b"), torch.device("cuda", 0), options)
