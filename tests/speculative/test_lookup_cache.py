"""Indexes are built once and forgotten in the order of their use."""

import threading

import numpy as np
import pytest

from ragflash.speculative.lookup import IndexCache, SourceIndex


def text(start):
    return [*range(start, start + 100)]


SIZE = len(SourceIndex.build(text(0)).block)


def test_equal_tokens_share_an_index():
    cache = IndexCache(10 * SIZE)
    index = cache.get(text(0))
    assert cache.get(np.asarray(text(0))) is index
    assert cache.get(text(1)) is not index
    assert cache.num_bytes == 2 * SIZE


def test_what_was_wanted_longest_ago_goes_first():
    cache = IndexCache(2 * SIZE)
    first, second = cache.get(text(0)), cache.get(text(1))
    assert cache.get(text(0)) is first
    cache.get(text(2))
    assert cache.num_bytes == 2 * SIZE
    assert cache.get(text(0)) is first
    assert cache.get(text(1)) is not second


def test_an_index_larger_than_the_cache_is_not_kept():
    cache = IndexCache(SIZE - 1)
    assert len(cache.get(text(0))) == 100
    assert cache.num_bytes == 0


def test_threads_wait_for_the_one_that_builds(monkeypatch):
    cache, build = IndexCache(10 * SIZE), SourceIndex.build
    begun, may_end, built = threading.Event(), threading.Event(), []

    def build_slowly(token_ids):
        begun.set()
        assert may_end.wait(60)
        built.append(build(token_ids))
        return built[-1]

    monkeypatch.setattr(SourceIndex, "build", build_slowly)
    got = []
    threads = [threading.Thread(target=lambda: got.append(cache.get(text(0)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(built) == 1
    assert all(index is built[0] for index in got)
    assert len(got) == 4


def test_a_failure_is_told_and_tried_again(monkeypatch):
    cache = IndexCache(10 * SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(SourceIndex, "build", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.get(text(0))
    assert len(cache.get(text(0))) == 100
