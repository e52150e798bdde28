"""A block of multi-token prediction as layers and in its fused form, and what both are fed with."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVPages, PackedPool, PagePool
from ragflash.kvcache.table import PageConversion
from ragflash.models.contract import SequenceRows
from ragflash.models.device.model import DeviceModel
from ragflash.models.device.mtp import DeviceMtp
from ragflash.models.mtp_runner import HostMtp, MtpRunner
from ragflash.models.qwen35 import Qwen35
from ragflash.models.registry import load_records
from tests.models.forwards import PAGES, load

NUM_PAGES = len(PAGES)
NEAR = 0.1  # of how logits spread


@dataclass(frozen=True)
class Blocks:
    """The same block as layers in float32, and in its fused form, each with its pages."""

    model: Qwen35
    layers: HostMtp
    layer_pages: KVPages
    card: DeviceModel
    fused: DeviceMtp
    pages: KVPages

    @property
    def layer(self) -> int:
        """Of the pages."""
        return len(self.model.kv_layout.layers) - 1


@dataclass(frozen=True)
class Text:
    """Random tokens, and rows of a stream before each of them."""

    token_ids: list[int]
    stream: torch.Tensor

    @classmethod
    def random(cls, num_tokens: int, vocab_size: int, hidden_size: int) -> "Text":
        generator = torch.Generator().manual_seed(7)
        token_ids = random.Random(6).choices(range(vocab_size), k=num_tokens)
        return cls(token_ids, torch.randn(num_tokens, hidden_size, generator=generator))


def make_blocks(path: Path, device: torch.device, dtype: torch.dtype) -> Blocks:
    """Load a file twice; all pages hold NaN."""
    model = load(path)
    assert isinstance(model, Qwen35)
    assert model.mtp is not None
    with GGUFFile.open(path) as file:
        decoder = load_records(file, device)
    own, pages = (
        KVPages(
            PagePool(one.kv_layout, NUM_PAGES, where),
            PackedPool(one.kv_layout, "q8_0", NUM_PAGES, where),
        )
        for one, where in ((model, torch.device("cpu")), (decoder, device))
    )
    for pool in (own.exact, pages.exact):
        for page in PAGES:
            pool.page(page).fill_(float("nan"))
    card = DeviceModel(
        decoder, device, pages, num_tokens=decoder.vocab_size, max_slots=2, exact_pages=NUM_PAGES,
        packed_pages=NUM_PAGES, chunk_tokens=300, tap_layers=(1,), has_mtp=True, dtype=dtype,
    )  # fmt: skip
    assert card.mtp is not None
    return Blocks(model, HostMtp(model, model.mtp, own), own, card, card.mtp, pages)


def fill_packed(blocks: Blocks, *, source: int, packed: int) -> None:
    """Fill all pages of the block at random, and pack one of them, its values all alike."""
    for pages in (blocks.layer_pages, blocks.pages):
        generator = torch.Generator().manual_seed(8)
        for pool in (pages.exact.keys(blocks.layer), pages.exact.values(blocks.layer)):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        values = pages.exact.values(blocks.layer)[source]
        values.copy_(values[0, 0] * 4)  # so that their mean is far from zero
        pages.convert([PageConversion(source, packed)])


def absorb(runner: MtpRunner, text: Text, chunks: tuple[int, ...]) -> None:
    start = 0
    for size in chunks:
        end = start + size
        stream = text.stream[start:end].to(runner.nothing)
        runner.absorb(stream, text.token_ids[start:end], SequenceRows(0, size, start, PAGES, ()))
        start = end


def assert_likely(
    blocks: Blocks, stream: torch.Tensor, token_id: int, rows: SequenceRows, drafted: list[int]
) -> None:
    """Each token is the layers' likeliest behind those before it, or nearly."""
    assert len(drafted) == rows.num_rows
    head = blocks.model.mtp
    assert head is not None
    hidden, token = blocks.layers._read(stream), token_id
    for depth, found in enumerate(drafted):
        row = replace(rows, num_rows=1, committed=rows.committed + depth)
        hidden = blocks.layers._further(hidden, [token], row)
        logits = head.logits(hidden)[0]
        assert logits.max() - logits[found] < NEAR * logits.std()
        token = found
