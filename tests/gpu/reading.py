"""Models for one sequence, text to feed them with, and what they choose."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ragflash.engine.card import CardOptions, place_on_card
from ragflash.engine.host import HostOptions, place_on_host
from ragflash.engine.placed import Placed
from ragflash.engine.reading import Reading
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.kvcache.formats import KVFormatName

ROOT = Path(__file__).parents[2]


def place(
    path: Path, device: str, *, context_tokens: int, kv_format: KVFormatName, exact: bool = False
) -> Placed:
    """Load a model for one sequence."""
    with GGUFFile.open(path) as file:
        if device == "cpu":
            form = "auto" if kv_format == "f16" else kv_format
            host = HostOptions("float32", "dense", form, 512, context_tokens, 1 << 30, 1)
            return place_on_host(file, host)
        card = CardOptions(None, context_tokens, kv_format, 1, 21, exact)
        return place_on_card(file, torch.device("cuda", 0), card)


def read_tokens(path: Path, count: int) -> list[int]:
    """Return tokens of this repository's own prose and code."""
    files = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
    files += sorted(ROOT.glob("ragflash/**/*.py"))
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    tokens: list[int] = []
    for one in files:
        tokens += tokenizer.encode(one.read_text(encoding="utf-8"))
        if len(tokens) >= count:
            return tokens[:count]
    raise AssertionError(f"there are {len(tokens)} tokens of text, {count} are wanted")


def read(placed: Placed, tokens: Sequence[int], rows: int) -> Iterator[torch.Tensor]:
    """Give the logits after every one of `tokens`, so many at a time, each until the next."""
    reading, start = Reading(placed, len(tokens)), 0
    while start < len(tokens):
        part = tokens[start : start + min(rows, reading.room)]
        yield reading.feed(part, num_draft=len(part) - 1)
        start += len(part)
    reading.close()


def choices(placed: Placed, tokens: Sequence[int], rows: int) -> torch.Tensor:
    """Return the likeliest token after every one of `tokens`, computed so many at a time."""
    return torch.cat([logits.argmax(-1) for logits in read(placed, tokens, rows)])


def logits_of(placed: Placed, tokens: Sequence[int], rows: int) -> torch.Tensor:
    """Return the logits after every one of `tokens` on the host."""
    return torch.cat([logits.cpu().clone() for logits in read(placed, tokens, rows)])
