"""An engine whose model and drafter are a card's programmes drafts blocks, as a card would."""

import pytest
import torch

from ragflash.engine import build
from ragflash.engine.placed import Placed
from ragflash.engine.request import DraftMode
from ragflash.engine.row_drafters import DrafterOptions
from ragflash.kvcache.allocator import PageAllocator
from ragflash.kvcache.grid import PageAllocators
from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.models.device.graphs import ROW_COUNTS
from ragflash.models.device.model import DeviceModel
from ragflash.models.dflash import Target, load_drafter
from ragflash.models.dflash.device import DeviceDFlash
from ragflash.models.dflash.paged_ring import PagedRings
from ragflash.models.registry import load_records
from tests.engine.drafted import REQUESTS, ask, counted, start, told, write_target
from tests.models.dflash.drafters import (
    SECOND,
    gguf_metadata,
    gguf_tensors,
    make_toy,
    write_gguf_drafter,
)
from tests.models.families import HIDDEN_SIZE
from tests.models.toy_files import TOKENS

CPU = torch.device("cpu")
NUM_PAGES = 8
ARCHITECTURE = "qwen35-dflash-draft"


def write_drafter(path, *, is_constant=False, second=False):
    """Write a random drafter for a toy; the layers of a constant one add nothing to the stream."""
    own = {
        "mask_token_id": len(TOKENS) - 1,
        "target_layer_ids": [0, 2],
        **(SECOND if second else {}),
    }
    toy = make_toy(
        vocab_size=len(TOKENS), hidden_size=HIDDEN_SIZE, second=second, dflash_config=own
    )
    if is_constant:
        for name, values in toy.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                values.data.zero_()
    metadata = gguf_metadata(toy, ARCHITECTURE) | {
        f"{ARCHITECTURE}.embedding_length": HIDDEN_SIZE,
        f"{ARCHITECTURE}.dflash.target_layer_ids": own["target_layer_ids"],
    }
    tensors = gguf_tensors(toy, ARCHITECTURE)
    return write_gguf_drafter(path, ARCHITECTURE, metadata, tensors, quantized=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dflash")
    return {
        "target": write_target(folder / "target", "qwen35"),
        "constant": write_target(folder / "constant", "llama", is_constant=True),
        "first": write_drafter(folder / "first"),
        "second": write_drafter(folder / "second", second=True),
        "right": write_drafter(folder / "right", is_constant=True),
    }


@pytest.fixture
def on_card(monkeypatch, files):
    """Have engines start with a drafter, placed as `place_on_card` does it."""

    def begin(target, drafter, **options):
        def place(file, options) -> Placed:
            decoder = load_records(file, CPU)
            pages = KVPages(PagePool(decoder.kv_layout, NUM_PAGES))
            loaded = load_drafter(
                files[drafter], Target.of(decoder), dtype=torch.float32, form="records"
            )
            model = DeviceModel(
                decoder, CPU, pages, num_tokens=len(TOKENS), max_slots=options.max_slots,
                exact_pages=NUM_PAGES, packed_pages=0, chunk_tokens=256,
                row_counts=ROW_COUNTS[-1:], tap_layers=loaded.config.tap_layers,
                dtype=torch.float32,
            )  # fmt: skip
            rings = PagedRings(
                loaded.config, max_slots=options.max_slots, device=CPU, num_tokens=128,
                page_tokens=32,
            )  # fmt: skip
            placed = DeviceDFlash(
                loaded, CPU, max_slots=options.max_slots, chunk_tokens=256,
                workspace=model.workspace, rings=rings,
            )  # fmt: skip
            allocators = PageAllocators(PageAllocator(NUM_PAGES))
            return Placed(model, pages, allocators, "cpu", "int8", model.warm_up, placed)

        monkeypatch.setattr(build, "place_on_host", place)
        given = DrafterOptions(file=files[drafter])
        return start(files[target], drafts=True, row_drafters=given, **options)

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["first", "second"])
def test_answers_are_the_same_with_chains_and_trees(on_card, drafter):
    with on_card("target", drafter) as engine:
        for request in REQUESTS:
            plain = ask(engine, draft=DraftMode.OFF, **request)
            chain = ask(engine, draft=DraftMode.DFLASH, **request)
            tree = ask(engine, draft=DraftMode.TREE, **request)
            assert told(chain) == told(plain) == told(tree)
            if "constraint" not in request:  # which forbids most of what is random
                assert {count.source for count in chain.timings.drafts} == {"dflash"}
                assert "dflash" in {count.source for count in tree.timings.drafts}


def test_all_is_accepted_of_a_drafter_that_is_right(on_card):
    with on_card("constant", "right") as engine:
        found = ask(engine, draft=DraftMode.DFLASH, max_tokens=20)
        plain = ask(engine, draft=DraftMode.OFF, max_tokens=20)
        auto = ask(engine, draft=DraftMode.AUTO, max_tokens=20)
    assert told(found) == told(plain) == told(auto)
    (drafts,) = found.timings.drafts
    assert drafts.drafted == drafts.accepted > 12


def test_drafts_after_a_restore_are_those_of_a_cold_prompt(on_card):
    with on_card("target", "first", max_slots=1) as engine:
        cold = ask(engine, "What?", draft=DraftMode.DFLASH, cache=False, max_tokens=8)
        ask(engine, "How often?", draft=DraftMode.OFF, max_tokens=1)  # it leaves the document
        warm = ask(engine, "What?", draft=DraftMode.DFLASH, max_tokens=8)
    assert cold.usage.cached_tokens == 0 < warm.usage.cached_tokens
    assert (told(warm), counted(warm)) == (told(cold), counted(cold))
    assert warm.timings.draft_n > 0
