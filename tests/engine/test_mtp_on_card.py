"""An engine around a card's programme drafts with the block of the file, as on a card."""

import asyncio

import pytest
import torch

from ragflash.engine import build
from ragflash.engine.placed import Placed
from ragflash.engine.request import DraftMode
from ragflash.kvcache.allocator import PageAllocator, PageForm
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.pages import KVPages, PackedPool, PagePool
from ragflash.models.device.model import DeviceModel
from ragflash.models.registry import load_records
from tests.engine.drafted import REQUESTS, ask, counted, request, start, told, write_with_mtp
from tests.models.toy_files import TOKENS
from tests.slow import slow

CPU = torch.device("cpu")
NUM_PAGES = 24


def place(file, options) -> Placed:
    """Stand in for `place_on_card`."""
    decoder = load_records(file, CPU)
    pages = KVPages(
        PagePool(decoder.kv_layout, NUM_PAGES), PackedPool(decoder.kv_layout, "q8_0", NUM_PAGES)
    )
    numbers = PageAllocator(NUM_PAGES), PageAllocator(NUM_PAGES, PageForm.PACKED)
    model = DeviceModel(
        decoder, CPU, pages, num_tokens=len(TOKENS), max_slots=options.max_slots,
        exact_pages=NUM_PAGES, packed_pages=NUM_PAGES, chunk_tokens=256, tap_layers=(),
        has_mtp=True, dtype=torch.float32,
    )  # fmt: skip
    return Placed(model, pages, PageAllocators(*numbers, Grid(256)), "cpu", "int8", model.warm_up)


@pytest.fixture
def on_card(monkeypatch):
    monkeypatch.setattr(build, "place_on_host", place)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    return {right: write_with_mtp(folder / f"{right}", is_right=right) for right in (True, False)}


@pytest.mark.parametrize("wanted", [REQUESTS[0], *slow(REQUESTS[1])])
def test_answers_are_the_same_with_drafts(on_card, files, wanted):
    with start(files[False], drafts=True) as engine:
        plain = ask(engine, draft=DraftMode.OFF, max_tokens=12, **wanted)
        found = ask(engine, draft=DraftMode.MTP, max_tokens=12, **wanted)
    assert told(found) == told(plain)
    assert {count.source for count in found.timings.drafts} == {"mtp"}


def test_all_is_accepted_of_a_block_that_is_right(on_card, files, monkeypatch):
    """Two requests at once; no logits leave the card for them."""
    monkeypatch.setattr(DeviceModel, "forward_tapped", None)

    async def ask_all(engine, *modes):
        wanted = (request(draft=mode, max_tokens=20) for mode in modes)
        return await asyncio.gather(*map(engine.complete, wanted))

    with start(files[True], drafts=True) as engine:
        plain, *found = asyncio.run(ask_all(engine, DraftMode.OFF, DraftMode.MTP, DraftMode.MTP))
        auto = ask(engine, draft=DraftMode.AUTO, max_tokens=20)
    for one in found:
        assert told(one) == told(plain) == told(auto)
        (drafts,) = one.timings.drafts
        assert drafts.drafted == drafts.accepted == 15


@pytest.mark.slow
def test_drafts_after_a_restore_are_those_of_a_cold_prompt(on_card, files):
    with start(files[False], drafts=True) as engine:
        cold = ask(engine, "What?", draft=DraftMode.MTP, cache=False, max_tokens=30)
        ask(engine, "How often?", draft=DraftMode.OFF)  # it leaves the document
        warm = ask(engine, "What?", draft=DraftMode.MTP, max_tokens=30)
    assert cold.usage.cached_tokens == 0 < warm.usage.cached_tokens
    assert (told(warm), counted(warm)) == (told(cold), counted(cold))
    assert warm.timings.draft_n > 0
