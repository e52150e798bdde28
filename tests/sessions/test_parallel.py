"""Many threads on one folder that is too small: nobody gets another's bytes, and nothing leaks."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ragflash.sessions import FileMiss, FileMissReason, RefusalReason
from tests.sessions.samples import (
    ITEMS,
    LIMITS,
    RULES,
    bytes_of,
    fetch,
    files_of,
    open_folder,
    store,
)

NUM_THREADS = 8
NUM_STEPS = 60
NUM_DOCUMENTS = 12
ROOM = 6


def prompt_of(number: int) -> tuple[tuple[int, ...], ...]:
    return RULES, (*range(1000), number)


def test_threads_that_store_read_pin_and_delete_do_not_meet(path):
    folder = open_folder(path)
    store(folder, RULES, seconds=1e6)
    store(folder, *prompt_of(0))
    size = folder.list()[0].size_bytes
    folder.close()
    limits = replace(LIMITS, quota_bytes=ROOM * size)
    folder = open_folder(path, limits)
    allowed = {
        RefusalReason.ALREADY_STORED,
        RefusalReason.QUOTA,
        RefusalReason.PARENT_NOT_STORED,
        RefusalReason.SOURCE_DELETED,
    }

    def live(seed: int) -> int:
        chance, found = random.Random(seed), 0
        for _ in range(NUM_STEPS):
            number = chance.randrange(NUM_DOCUMENTS)
            prompt = prompt_of(number)
            match chance.randrange(10):
                case 0:
                    folder.delete_source(f"doc_{seed}_{number}")
                case 1:
                    folder.gc()
                case 2 | 3 | 4:
                    source = f"doc_{seed}_{chance.randrange(1 << 30)}"
                    refused = store(folder, *prompt, source_ids=[source])
                    assert refused is None or refused.reason in allowed, refused
                case _:
                    data = fetch(folder, *prompt)
                    if isinstance(data, FileMiss):
                        assert data.reason is not FileMissReason.DAMAGED
                    else:
                        assert data == bytes_of(ITEMS, prompt)
                        found += 1
        return found

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(live, range(NUM_THREADS)))
    assert sum(found) > NUM_THREADS
    counts = folder.gc()
    assert counts.num_set_aside == 0
    assert counts.size_bytes == sum(file.stat().st_size for file in files_of(path))
    assert counts.size_bytes <= limits.quota_bytes
    folder.close()
    assert open_files(path) == []


def open_files(path: Path) -> list[str]:
    """Return what this process still has open below a folder."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(link))  # noqa: PTH115
        except FileNotFoundError:  # the listing's own
            continue
    return [link for link in links if link.startswith(str(path))]
