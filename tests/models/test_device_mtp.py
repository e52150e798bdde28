"""A block of multi-token prediction on a card, against the same block as layers."""

from pathlib import Path

import pytest
import torch

from ragflash.models.contract import SequenceRows
from ragflash.models.mtp import MAX_DEPTH
from tests.models.families import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE
from tests.models.forwards import PAGES
from tests.models.mtp_blocks import Text, absorb, assert_likely, fill_packed, make_blocks
from tests.models.mtp_reference import MtpReference
from tests.models.programmes import CPU, assert_near
from tests.models.toy_files import write_gguf

TEXT = Text.random(300, VOCAB_SIZE, HIDDEN_SIZE)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    metadata = {**FAMILIES["qwen35"].metadata, "block_count": 5, "nextn_predict_layers": 1}
    path = tmp_path_factory.mktemp("mtp") / "toy.gguf"
    return write_gguf(path, "qwen35", metadata, MtpReference().tensors(), quantized=True)


@pytest.mark.parametrize("chunks", [(299,), (7, 32, 1, 40, 21)])
def test_keys_and_values_are_those_of_the_layers(path, chunks):
    blocks = make_blocks(path, CPU, torch.float32)
    absorb(blocks.layers, TEXT, chunks)
    absorb(blocks.fused, TEXT, chunks)
    page, end = PAGES[0], min(sum(chunks), 256)
    for kind in ("keys", "values"):
        expected, found = (
            getattr(pages.exact, kind)(blocks.layer)[page].float()
            for pages in (blocks.layer_pages, blocks.pages)
        )
        assert_near(found[:, :end], expected[:, :end], 0.03)
        assert found[:, end:].isnan().all()


@pytest.mark.parametrize("num_read", [0, 254])
@pytest.mark.parametrize("depth", [1, MAX_DEPTH])
def test_drafts_are_those_of_the_layers(path, num_read, depth):
    """At the beginning, and over the end of a page."""
    blocks = make_blocks(path, CPU, torch.float32)
    for runner in (blocks.layers, blocks.fused):
        absorb(runner, TEXT, (num_read,) if num_read else ())
    rows = SequenceRows(0, depth, num_read, PAGES, ())
    stream, token_id = TEXT.stream[num_read][None], TEXT.token_ids[num_read]
    drafted = blocks.fused.draft(stream, token_id, rows)
    assert_likely(blocks, stream, token_id, rows, drafted)
    assert blocks.fused.draft(stream, token_id, rows) == drafted


def test_drafts_read_packed_pages(path):
    """Tokens 256 to 511 are packed; the second exact page holds those after them."""
    blocks = make_blocks(path, CPU, torch.float32)
    fill_packed(blocks, source=3, packed=2)
    rows, other = (SequenceRows(0, 3, 530, (0, 1), (), packed_pages=(page,)) for page in (2, 0))
    stream, token_id = TEXT.stream[:1], TEXT.token_ids[0]
    drafted = blocks.fused.draft(stream, token_id, rows)
    assert_likely(blocks, stream, token_id, rows, drafted)
    assert blocks.fused.draft(stream, token_id, other) != drafted
