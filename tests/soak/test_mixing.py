"""Whatever is asked side by side, from whichever tier: no answer holds what is another's."""

import asyncio
import ctypes
import gc
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ragflash.sessions import SessionFolder, SessionLimits
from tests.engine.harness import ToyEngine, toy_engine
from tests.engine.test_file_tier import open_archive
from tests.engine.trees import wild_tree
from tests.sessions.samples import IDENTITY, SHARED_MEMORY, files_of
from tests.soak.askers import KINDS, Askers
from tests.soak.marked import TOKENIZER, VOCAB_SIZE, MarkReader, following

NUM_ASKERS = 16
NUM_DOCUMENTS = 20
MAX_SLOTS = 8
# Memory may grow by what is bounded for itself (SQLite's cache of pages alone takes up to 2 MiB),
# and by what each request may leave: ids of deleted documents, keys of evicted segments. A prompt
# here has 900 tokens, so that their numbers alone, were they left behind, would be 7,300 bytes each
# time; a page of keys would be 64 KiB.
MOST_BYTES = 2 << 20
MOST_BYTES_A_REQUEST = 700


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="ragflash-") as name:
        yield Path(name)


class Memory:
    """Resident memory of this process against requests that were served."""

    def __init__(self) -> None:
        self.num_served = 0
        self.samples: list[tuple[int, int]] = []
        self._next = 0.0

    def serve(self) -> None:
        """Count a request; look at the memory each second."""
        self.num_served += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 1
            self.samples.append((self.num_served, resident_bytes()))

    def assert_flat(self) -> None:
        """Compare the second half, its slope by least squares, with what may be left behind."""
        half = np.array(self.samples[len(self.samples) // 2 :], dtype=np.float64)
        slope, _ = np.polyfit(half[:, 0], half[:, 1], 1)
        num_requests = half[-1, 0] - half[0, 0]
        most = MOST_BYTES + MOST_BYTES_A_REQUEST * num_requests
        assert slope * num_requests < most, self.samples


def resident_bytes() -> int:
    """Memory in use: what is garbage, or free and not given back yet, does not count."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def assert_nothing_is_left(engine: ToyEngine, folder: SessionFolder, askers: Askers) -> None:
    engine.assert_pages_are_accounted_for()
    assert sorted(engine.scheduler._free_slots) == [*range(MAX_SLOTS)]
    assert folder.verify() == ()
    assert list(folder._path.glob("*/*.part")) == []
    before, after = folder.list(), folder.recount()
    assert (len(before), sum(info.size_bytes for info in before)) == (
        after.num_segments,
        after.size_bytes,
    )
    written = [file.read_bytes() for file in files_of(folder._path)]
    for document in askers.deleted:
        for mark in document.marks:
            tokens = array("I", mark.encode()).tobytes()
            assert not any(tokens in data for data in written), document


@pytest.mark.parametrize(
    ("seconds", "kv_format"),
    [
        (2, "q8_0"),
        pytest.param(60, "q8_0", marks=pytest.mark.slow),
        pytest.param(60, "f16", marks=pytest.mark.slow),
    ],
)
def test_nothing_of_one_document_is_in_an_answer_about_another(seconds, kv_format, path):
    """Memory has room for a few documents, files for half of them."""
    memory = Memory() if seconds >= 60 else None
    limits = SessionLimits(quota_bytes=3 << 20, min_free_bytes=0)
    with open_archive(path, limits, queued_bytes=4 << 20) as archive:
        options = {
            "kv_format": kv_format,
            "num_pages": 64,
            "num_packed_pages": 40,
            "grid_tokens": 256,
            "max_slots": MAX_SLOTS,
            "draft": wild_tree(following, VOCAB_SIZE),
            "archive": archive,
            "identity": IDENTITY,
        }
        folder = archive._folder
        with toy_engine(MarkReader(), TOKENIZER, **options) as engine:
            askers = Askers(engine.client, folder, num_documents=NUM_DOCUMENTS)

            def after_each() -> None:
                engine.drafters.clear()  # the harness remembers them all
                if memory is not None:
                    memory.serve()

            asyncio.run(askers.run(NUM_ASKERS, seconds, after_each))
            archive.flush()
            assert askers.counts.keys() >= KINDS, askers.counts
            assert engine.store.num_evicted > 0
            assert archive.counts().saved > len(folder.list()), "files made room, too"
            assert_nothing_is_left(engine, folder, askers)
    if memory is not None:
        memory.assert_flat()
