"""A drafter as a card runs it, by the plain forms of its kernels, against the layers themselves."""

from dataclasses import dataclass

import pytest
import torch

from ragflash.errors import ModelError
from ragflash.models.dflash import DFlashModel, DraftSequence, load_drafter
from ragflash.models.dflash.device import DeviceDFlash, DeviceSequence
from ragflash.models.dflash.paged_ring import PagedRings
from tests.models.dflash.drafters import (
    BLOCK,
    FULL,
    SLIDING,
    gguf_metadata,
    gguf_tensors,
    make_toy,
    write_folder,
    write_gguf_drafter,
)

CPU = torch.device("cpu")
RING, PAGE, SLOTS, CHUNK = 64, 32, 2, 48
TOYS = {
    "first": make_toy((SLIDING, SLIDING, FULL)),
    "causal": make_toy((SLIDING, FULL), is_causal=True),
    "free": make_toy((SLIDING, FULL), is_causal=False),
    "second": make_toy((SLIDING, FULL), second=True),
}


@dataclass(frozen=True)
class Pair:
    """The same file as layers, and as on a card."""

    layers: DFlashModel
    device: DeviceDFlash
    features: torch.Tensor

    def host(self) -> DraftSequence:
        return DraftSequence(self.layers, RING)

    def card(self, slot: int = 1) -> DeviceSequence:
        return DeviceSequence(self.device, lambda: slot)


def device_of(model: DFlashModel) -> DeviceDFlash:
    rings = PagedRings(model.config, max_slots=SLOTS, device=CPU, num_tokens=RING, page_tokens=PAGE)
    return DeviceDFlash(
        model, CPU, max_slots=SLOTS, chunk_tokens=CHUNK, workspace=torch.empty(0), rings=rings
    )


@pytest.fixture(scope="module", params=TOYS)
def pair(request, tmp_path_factory) -> Pair:
    toy, architecture = TOYS[request.param], "dflash-draft"
    if request.param in {"first", "second"}:
        architecture = "qwen35-dflash-draft"  # whose layers with windows are causal
    path = write_gguf_drafter(
        tmp_path_factory.mktemp("drafter") / "toy.gguf", architecture,
        gguf_metadata(toy, architecture), gguf_tensors(toy, architecture), quantized=True,
    )  # fmt: skip

    def load(form):
        return load_drafter(path, toy.target, dtype=torch.float32, form=form)

    return Pair(load("dense"), device_of(load("records")), toy.features(400).bfloat16().float())


def drafts(sequence, position: int):
    return sequence.draft(7, position, BLOCK - 1, 16)


def assert_near(found, expected) -> None:
    """Each candidate's log-probability is that of the layers, to the grid's arithmetic."""
    spread = expected.log_probs.std()
    off = (found.log_probs - expected.log_probs).square().mean().sqrt()
    assert off < 0.2 * spread
    alike = (found.token_ids[:, 0] == expected.token_ids[:, 0]).float().mean()
    assert alike >= 0.6


@pytest.mark.parametrize("parts", [[5], [33, 7, 1], [40, 32, 32, 1, 3], [200, 100, 2]])
def test_drafts_what_the_layers_draft(pair, parts):
    """Contexts below and above windows, rings that wrapped, few and many rows at a time."""
    host, card, total = pair.host(), pair.card(), sum(parts)
    for rows in pair.features[:total].split(parts):
        host.append(rows)
        card.append(rows)
    assert card.position == total
    assert_near(drafts(card, total), drafts(host, total))
    host.truncate(total - 3)
    card.truncate(total - 3)
    host.append(pair.features[300:301])
    card.append(pair.features[300:301])
    assert_near(drafts(card, total - 2), drafts(host, total - 2))


def test_a_stored_context_drafts_the_same_in_another_slot(pair):
    card, again = pair.card(), pair.card(slot=0)
    card.append(pair.features[:150])
    card.truncate(140)
    again.load(card.export())
    assert again.position == 140
    for _ in range(2):
        mine, other = drafts(card, card.position), drafts(again, again.position)
        assert torch.equal(mine.token_ids, other.token_ids)
        assert torch.equal(mine.log_probs, other.log_probs)
        assert mine.chain == other.chain
        card.append(pair.features[200:206])
        again.append(pair.features[200:206])


def test_narrow_drafts_are_the_beginning_of_whole_ones(pair):
    card = pair.card()
    card.append(pair.features[:20])
    whole = drafts(card, 20)
    narrow = card.draft(7, 20, width=2, top_k=3)
    assert narrow.chain == whole.chain[:2]
    kept = max(3, pair.device.config.selector.top_k if pair.device.config.selector else 0)
    assert torch.equal(narrow.token_ids, whole.token_ids[:2, :kept])
    with pytest.raises(ValueError, match="features end at 20"):
        card.draft(7, 21, width=2)


def test_who_lost_its_slot_begins_anew(pair):
    first, second, fresh = pair.card(), pair.card(), pair.card(slot=0)
    first.append(pair.features[:40])
    second.append(pair.features[100:130])
    first.truncate(36)
    first.append(pair.features[36:50])
    fresh.restart(36)
    fresh.append(pair.features[36:50])
    assert torch.equal(drafts(first, 50).log_probs, drafts(fresh, 50).log_probs)


def test_what_a_card_cannot_run_is_refused(tmp_path):
    toy = TOYS["first"]
    folder = write_folder(toy, tmp_path / "toy")
    with pytest.raises(ModelError, match="GGUF"):
        device_of(load_drafter(folder, toy.target, dtype=torch.float32))
    wide = gguf_metadata(toy, "dflash-draft") | {"dflash-draft.dflash.block_size": 33}
    path = write_gguf_drafter(
        tmp_path / "wide.gguf", "dflash-draft", wide, gguf_tensors(toy, "dflash-draft"),
        quantized=True,
    )  # fmt: skip
    model = load_drafter(path, toy.target, dtype=torch.float32, form="records")
    with pytest.raises(ModelError, match="32 at most"):
        device_of(model)
