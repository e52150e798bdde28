"""One sequence on a model where it runs, fed with known tokens, without an engine around it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ragflash.engine.card import CardOptions, place_on_card
from ragflash.engine.host import HostOptions, place_on_host
from ragflash.engine.placed import Placed
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.kvcache.allocator import pages_for
from ragflash.kvcache.formats import KVFormatName
from ragflash.models.contract import ForwardBatch, SequenceRows

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


class Reading:
    """A sequence in slot 0 from its beginning."""

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._table = placed.allocators.new_table()
        placed.model.reset(0)

    def close(self) -> None:
        """Give the pages back."""
        self._table.release()

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int], *, num_draft: int = 0) -> torch.Tensor:
        """Compute rows, all of them valid; return the logits of all, until the next call."""
        table, model = self._table, self._placed.model
        committed, end = table.length, table.length + len(tokens)
        table.reserve(len(tokens))
        packed = table.packed_pages
        rows = SequenceRows(
            slot=0,
            num_rows=len(tokens),
            committed=committed,
            pages=table.pages[: pages_for(end) - len(packed)],
            logit_rows=tuple(range(len(tokens))),
            num_draft=num_draft,
            packed_pages=packed,
        )
        batch = ForwardBatch(torch.tensor(tokens), torch.arange(committed, end), (rows,))
        logits = model.forward(batch, self._placed.pages)
        model.commit(0, len(tokens))
        self._placed.pages.convert(table.advance(len(tokens)))
        return logits

    def choices(self, tokens: Sequence[int], rows: int) -> Iterable[torch.Tensor]:
        """Yield the likeliest token after every one of `tokens`, computed so many at a time."""
        for start in range(0, len(tokens), rows):
            part = tokens[start : start + rows]
            yield self.feed(part, num_draft=len(part) - 1).argmax(-1)
