"""A block of multi-token prediction on a card, against the same block as layers."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVPages, PackedPool, PagePool
from ragflash.kvcache.table import PageConversion
from ragflash.models.contract import SequenceRows
from ragflash.models.device.model import DeviceModel
from ragflash.models.device.mtp import DeviceMtp
from ragflash.models.mtp import MAX_DEPTH
from ragflash.models.mtp_runner import HostMtp, MtpRunner
from ragflash.models.qwen35 import Qwen35
from ragflash.models.registry import load_records
from tests.models.families import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE
from tests.models.forwards import PAGES, load, poisoned_pages
from tests.models.mtp_reference import MtpReference
from tests.models.programmes import CPU, assert_near
from tests.models.toy_files import write_gguf

TEXT = random.Random(6).choices(range(VOCAB_SIZE), k=300)
STREAM = torch.randn(301, HIDDEN_SIZE, generator=torch.Generator().manual_seed(7))
NEAR = 0.1  # of how logits spread


@dataclass(frozen=True)
class Blocks:
    """The same block as layers in float32, and in its fused form, each with its pages."""

    model: Qwen35
    layers: HostMtp
    layer_pages: KVPages
    fused: DeviceMtp
    pages: KVPages

    @property
    def layer(self) -> int:
        """Of the pages."""
        return len(self.model.kv_layout.layers) - 1


def make_blocks(path: Path, *, is_packed: bool = False) -> Blocks:
    model = load(path)
    assert isinstance(model, Qwen35)
    assert model.mtp is not None
    with GGUFFile.open(path) as file:
        decoder = load_records(file, CPU)
    own, pages = (poisoned_pages(one) for one in (model, decoder))
    if is_packed:
        own, pages = (
            KVPages(PagePool(one.kv_layout, 4), PackedPool(one.kv_layout, "q8_0", 4))
            for one in (model, decoder)
        )
    fused = DeviceModel(
        decoder, CPU, pages, num_tokens=VOCAB_SIZE, max_slots=2, exact_pages=len(PAGES),
        packed_pages=4 if is_packed else 0, chunk_tokens=300, tap_layers=(), has_mtp=True,
        dtype=torch.float32,
    ).mtp  # fmt: skip
    assert fused is not None
    return Blocks(model, HostMtp(model, model.mtp, own), own, fused, pages)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    metadata = {**FAMILIES["qwen35"].metadata, "block_count": 5, "nextn_predict_layers": 1}
    path = tmp_path_factory.mktemp("mtp") / "toy.gguf"
    return write_gguf(path, "qwen35", metadata, MtpReference().tensors(), quantized=True)


def rows_at(committed: int, num_rows: int) -> SequenceRows:
    return SequenceRows(0, num_rows, committed, PAGES, ())


def absorb(runner: MtpRunner, chunks: tuple[int, ...]) -> None:
    start = 0
    for size in chunks:
        end = start + size
        runner.absorb(STREAM[start:end], TEXT[start:end], rows_at(start, size))
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


@pytest.mark.parametrize("chunks", [(299,), (7, 32, 1, 40, 21)])
def test_keys_and_values_are_those_of_the_layers(path, chunks):
    blocks = make_blocks(path)
    absorb(blocks.layers, chunks)
    absorb(blocks.fused, chunks)
    page, end = PAGES[0], min(sum(chunks), 256)
    for kind in ("keys", "values"):
        expected, found = (
            getattr(pages.exact, kind)(blocks.layer)[page, :, :end].float()
            for pages in (blocks.layer_pages, blocks.pages)
        )
        assert_near(found, expected, 0.03)
        rest = getattr(blocks.pages.exact, kind)(blocks.layer)[page, :, end:]
        assert rest.isnan().all()


@pytest.mark.parametrize("num_read", [0, 40, 254])
@pytest.mark.parametrize("depth", [1, MAX_DEPTH])
def test_drafts_are_those_of_the_layers(path, num_read, depth):
    """At the beginning, behind a text, and over the end of a page."""
    blocks = make_blocks(path)
    for runner in (blocks.layers, blocks.fused):
        absorb(runner, (num_read,) if num_read else ())
    rows = rows_at(num_read, depth)
    stream, token_id = STREAM[num_read][None], TEXT[num_read]
    drafted = blocks.fused.draft(stream, token_id, rows)
    assert_likely(blocks, stream, token_id, rows, drafted)
    assert blocks.fused.draft(stream, token_id, rows) == drafted


def test_drafts_read_packed_pages(path):
    """Tokens 256 to 511 are packed; the second exact page holds those after them."""
    blocks = make_blocks(path, is_packed=True)
    for pages in (blocks.layer_pages, blocks.pages):
        generator = torch.Generator().manual_seed(8)
        for pool in (pages.exact.keys(blocks.layer), pages.exact.values(blocks.layer)):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        values = pages.exact.values(blocks.layer)[3]
        values.copy_(values[0, 0] * 4)  # all alike, so that their mean is far from zero
        pages.convert([PageConversion(3, 2)])
    rows, other = (SequenceRows(0, 3, 530, (0, 1), (), packed_pages=(page,)) for page in (2, 0))
    stream, token_id = STREAM[:1], TEXT[0]
    drafted = blocks.fused.draft(stream, token_id, rows)
    assert_likely(blocks, stream, token_id, rows, drafted)
    assert blocks.fused.draft(stream, token_id, other) != drafted
