"""Drafters that read rows of the model: the same answers, the same drafts after a restore."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from ragflash.engine.cache import CacheTier
from ragflash.engine.request import DraftMode
from ragflash.engine.row_drafters import DrafterOptions, RowDrafting
from ragflash.errors import InputError, SettingInvalid
from ragflash.models.decoder import Decoder
from ragflash.sessions import FolderArchive, SessionFolder, SessionLimits
from ragflash.speculative.dflash import DFlashDrafter
from ragflash.speculative.mtp import MtpDrafter
from tests.engine.drafted import (
    REQUESTS,
    ask,
    counted,
    start,
    told,
    write_drafter,
    write_target,
    write_with_mtp,
)
from tests.models.forwards import batch_of, load, poisoned_pages


@contextmanager
def archive_in(path):
    folder = SessionFolder.open(path, SessionLimits(quota_bytes=1 << 30, min_free_bytes=0))
    archive = FolderArchive(folder)
    try:
        yield archive
    finally:
        archive.close()
        folder.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("toys"), {}

    def file(name, is_right=False):
        key = f"{name}-{is_right}"
        if key not in made:
            path = folder / key
            if name == "drafter":
                made[key] = write_drafter(path, is_constant=is_right)
            elif name == "mtp":
                made[key] = write_with_mtp(path, is_right=is_right)
            else:
                made[key] = write_target(path, name, is_constant=is_right)
        return made[key]

    return file


def test_all_is_accepted_of_a_block_that_is_right(files):
    with start(files("mtp", is_right=True), drafts=True) as engine:
        found = ask(engine, draft=DraftMode.MTP, max_tokens=20)
        plain = ask(engine, draft=DraftMode.OFF, max_tokens=20)
        narrow = ask(engine, draft=DraftMode.MTP, draft_tokens=1, max_tokens=20)
    assert told(found) == told(plain) == told(narrow)
    (drafts,), (few,) = found.timings.drafts, narrow.timings.drafts
    assert drafts.drafted == drafts.accepted == 15
    assert few.accepted == 9


def test_all_is_accepted_of_a_drafter_that_is_right(files):
    drafter = files("drafter", is_right=True)
    with start(
        files("llama", is_right=True), drafts=True, row_drafters=DrafterOptions(file=drafter)
    ) as engine:
        found = ask(engine, draft=DraftMode.DFLASH, max_tokens=24)
        auto = ask(engine, max_tokens=200)
    assert found.text == "a" * 24
    (drafts,) = found.timings.drafts
    assert drafts.drafted == drafts.accepted == 19
    assert auto.timings.draft_n_accepted > 100


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (DraftMode.MTP, {}),
        (DraftMode.MTP, {"kv_format": "q8_0", "grid_tokens": 256}),
        (DraftMode.DFLASH, {}),
    ],
)
def test_drafts_after_a_restore_are_those_of_a_cold_prompt(files, mode, options):
    with start(
        files("mtp"), drafts=True, row_drafters=DrafterOptions(file=files("drafter")), **options
    ) as engine:
        cold = ask(engine, "What?", draft=mode, cache=False, max_tokens=30)
        ask(engine, "How often?", draft=DraftMode.OFF)  # it leaves the document
        warm = ask(engine, "What?", draft=mode, max_tokens=30)
    assert cold.usage.cached_tokens == 0 < warm.usage.cached_tokens
    assert (told(warm), counted(warm)) == (told(cold), counted(cold))
    assert warm.timings.draft_n > 0


@pytest.mark.parametrize("mode", [DraftMode.MTP, DraftMode.DFLASH])
def test_drafts_after_a_restart_are_those_before_it(files, mode, tmp_path):
    own = DrafterOptions(file=files("drafter"))
    options = {"drafts": True, "row_drafters": own, "kv_format": "q8_0", "grid_tokens": 256}
    with archive_in(tmp_path) as archive, start(files("mtp"), archive=archive, **options) as engine:
        cold = ask(engine, "What?", draft=mode, max_tokens=30)
    with archive_in(tmp_path) as archive, start(files("mtp"), archive=archive, **options) as engine:
        warm = ask(engine, "What?", draft=mode, max_tokens=30)
        ask(engine, "How often?", draft=mode)
    assert cold.usage.cached_tokens == 0 < warm.usage.cached_tokens
    assert warm.tier is CacheTier.FILE
    assert (told(warm), counted(warm)) == (told(cold), counted(cold))
    assert warm.timings.draft_n > 0


def test_files_of_another_engine_are_used_without_their_parts(files, tmp_path):
    """Written without the block, they have none of its; another drafter's is of no use."""
    path, other = files("mtp"), DrafterOptions(mtp=False, file=files("drafter", is_right=True))
    with (
        archive_in(tmp_path) as archive,
        start(path, archive=archive, drafts=True, row_drafters=other) as engine,
    ):
        plain = ask(engine, "What?", draft=DraftMode.OFF)
    own = DrafterOptions(file=files("drafter"))
    found = {}
    for mode in (DraftMode.MTP, DraftMode.DFLASH):
        with (
            archive_in(tmp_path) as archive,
            start(path, archive=archive, drafts=True, row_drafters=own) as engine,
        ):
            found[mode] = ask(engine, "What?", draft=mode)
    assert all(one.tier is CacheTier.FILE for one in found.values())
    assert all(told(one) == told(plain) for one in found.values())
    assert found[DraftMode.MTP].timings.draft_n == 0
    assert dict(found[DraftMode.MTP].timings.idle_steps).keys() == {"no_context"}
    assert found[DraftMode.DFLASH].timings.draft_n > 0


def test_a_state_that_nobody_understands_costs_drafts_alone(files):
    with start(files("mtp"), drafts=True) as engine:
        plain = ask(engine, "What?", draft=DraftMode.OFF)
        for segment in engine._worker._core._store.stored():
            segment.parts.update(mtp=b"of another version")
        found = ask(engine, "What?", draft=DraftMode.MTP)
    assert told(found) == told(plain)
    assert dict(found.timings.idle_steps).keys() == {"no_context"}


def test_pages_without_the_blocks_keys_are_not_drafted_behind(files):
    """What another engine left has none: the drafter waits, and says why."""
    with start(files("mtp"), drafts=True) as engine:
        plain = ask(engine, "What?", draft=DraftMode.OFF, cache=False)
        store = engine._worker._core._store
        ask(engine, "How often?")
        for segment in store.stored():
            segment.parts.clear()
        found = ask(engine, "What?", draft=DraftMode.MTP)
    assert found.usage.cached_tokens > 0
    assert told(found) == told(plain)
    assert counted(found)[0] == ()
    assert dict(found.timings.idle_steps).keys() == {"no_context"}


@pytest.mark.parametrize("drafter", [MtpDrafter, DFlashDrafter])
def test_drafters_are_told_the_rows_of_the_whole_text(files, drafter, monkeypatch):
    seen = {}

    def absorb(self, position, token_ids, rows):
        for at, (token_id, row) in enumerate(zip(token_ids, rows, strict=True), position):
            seen[at] = (token_id, row.clone())
        return absorb.own(self, position, token_ids, rows)

    absorb.own = drafter.absorb
    monkeypatch.setattr(drafter, "absorb", absorb)
    path = files("mtp")
    with start(path, drafts=True, row_drafters=DrafterOptions(file=files("drafter"))) as engine:
        mode = DraftMode.MTP if drafter is MtpDrafter else DraftMode.TREE
        ask(engine, draft=mode, sampling=REQUESTS[1]["sampling"])
    assert [*seen] == [*range(len(seen))]
    model = load(path)
    assert isinstance(model, Decoder)
    model.reset(0)
    token_ids = [token_id for token_id, _ in seen.values()]
    whole = model.forward_tapped(batch_of(token_ids, 0), poisoned_pages(model), (0, 2))
    expected = whole.stream if drafter is MtpDrafter else whole.taps
    rows = torch.stack([row for _, row in seen.values()])
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-3)


def test_nothing_of_a_request_outlives_it(files, monkeypatch):
    """A drafter may hold tens of megabytes, so it must not wait for the garbage collector."""
    made, drafters = [], RowDrafting.drafters

    def noting(self, sequence):
        made.append(weakref.ref(sequence))
        return drafters(self, sequence)

    monkeypatch.setattr(RowDrafting, "drafters", noting)
    gc.collect()
    gc.disable()
    try:
        with start(files("mtp"), drafts=True) as engine:
            for _ in range(2):
                ask(engine, draft=DraftMode.AUTO, max_tokens=4)
            assert made[0]() is None
    finally:
        gc.enable()


def test_what_cannot_be_had_is_refused_by_name(files):
    with start(files("llama"), drafts=True) as engine:
        with pytest.raises(InputError, match="no block of multi-token prediction"):
            ask(engine, draft=DraftMode.MTP)
        with pytest.raises(InputError, match="RAGFLASH_DRAFTER"):
            ask(engine, draft=DraftMode.DFLASH)
    with (
        start(files("mtp"), drafts=True, row_drafters=DrafterOptions(mtp=False)) as engine,
        pytest.raises(InputError, match="RAGFLASH_MTP=off"),
    ):
        ask(engine, draft=DraftMode.MTP)
    with pytest.raises(SettingInvalid, match="never be asked"):
        start(files("llama"), row_drafters=DrafterOptions(file=files("drafter")))
