"""Page numbers are held and freed exactly as often as asked; no torch is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from ragflash.kvcache.allocator import PageAllocator, PagesExhausted, pages_for

ROOT = Path(__file__).parents[2]


def test_takes_the_lowest_numbers_first():
    allocator = PageAllocator(6)
    assert allocator.allocate(4) == (0, 1, 2, 3)
    allocator.release([2, 0])
    assert allocator.allocate(3) == (0, 2, 4)
    assert allocator.num_free == 1


def test_takes_all_or_nothing():
    allocator = PageAllocator(3)
    allocator.allocate(1)
    with pytest.raises(PagesExhausted) as caught:
        allocator.allocate(3)
    assert (caught.value.wanted, caught.value.free) == (3, 2)
    assert allocator.num_free == 2
    assert allocator.allocate(0) == ()


def test_a_shared_page_is_free_after_its_last_holder():
    allocator = PageAllocator(1)
    pages = allocator.allocate(1)
    allocator.retain(pages)
    allocator.release(pages)
    assert (allocator.num_free, allocator.holders(0)) == (0, 1)
    allocator.release(pages)
    assert (allocator.num_free, allocator.holders(0)) == (1, 0)


def test_refuses_what_would_corrupt_the_count():
    allocator = PageAllocator(2)
    with pytest.raises(ValueError, match="released more often"):
        allocator.release([0])
    with pytest.raises(ValueError, match="free"):
        allocator.retain([1])
    with pytest.raises(ValueError, match="below 1"):
        PageAllocator(0)
    assert allocator.num_free == 2


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (256, 1), (257, 2), (512, 2)])
def test_pages_for_tokens(tokens, pages):
    assert pages_for(tokens) == pages


@pytest.mark.parametrize("module", ["allocator", "table", "segments", "tree"])
def test_does_not_import_torch(module):
    code = f"import sys; sys.modules['torch'] = None\nimport ragflash.kvcache.{module}\n"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
