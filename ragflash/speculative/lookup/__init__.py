"""Drafts that are looked up: what followed the last tokens before, in a document or in the output.

Numpy alone: indexes are built on callers' threads and read on the engine's.
"""

from ragflash.speculative.lookup.cache import IndexCache
from ragflash.speculative.lookup.drafter import LookupDrafter, Match
from ragflash.speculative.lookup.source_index import Interval, SourceIndex

__all__ = ["IndexCache", "Interval", "LookupDrafter", "Match", "SourceIndex"]
