"""Indexes of documents that are asked about again, in as many bytes as are allowed."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from ragflash.speculative.lookup.source_index import SourceIndex, as_text, key_of


class IndexCache:
    """Builds every index once, also when several threads want it; may be used from any thread.

    Args:
        max_bytes: Of all indexes that are kept; the one that was wanted longest ago goes first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, SourceIndex] = OrderedDict()
        self._building: dict[bytes, Future[SourceIndex]] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the indexes that are kept."""
        return self._num_bytes

    def get(self, token_ids: Sequence[int] | NDArray[np.integer]) -> SourceIndex:
        """Return the index of a source, built now if it is not kept.

        Raises:
            ValueError: See `SourceIndex.build`.
        """
        text = as_text(token_ids)
        key = key_of(text)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            others = self._building.get(key)
            if others is None:
                ours = self._building[key] = Future()
        if others is not None:
            return others.result()
        try:
            index = SourceIndex.build(text)
            ours.set_result(index)
        except BaseException as error:
            ours.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._building[key]
        self._keep(index)
        return index

    def clear(self) -> None:
        """Forget all indexes; those in use go with their users."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def _keep(self, index: SourceIndex) -> None:
        with self._lock:
            before = self._kept.pop(index.key, None)
            self._num_bytes -= before.num_bytes if before else 0
            self._kept[index.key] = index
            self._num_bytes += index.num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes
