"""What a step costs is measured without a trace."""

import pytest
import torch

from ragflash.engine.host import HostOptions, place_on_host
from ragflash.engine.step_costs import measure_step_costs
from ragflash.gguf.reader import GGUFFile
from ragflash.models.contract import ForwardBatch, SequenceRows
from tests.models.families import FAMILIES
from tests.models.toy_files import write_gguf


@pytest.mark.parametrize("architecture", ["llama", "qwen35", "gemma3"])
@pytest.mark.parametrize("kv_format", ["auto", "q8_0"])
def test_all_rows_and_lengths_are_timed_and_states_are_as_before(tmp_path, architecture, kv_format):
    family, path = FAMILIES[architecture], tmp_path / "toy.gguf"
    metadata = {**family.metadata, "context_length": 6000}
    write_gguf(path, family.architecture, metadata, family.tensors(family.build()))
    with GGUFFile.open(path) as file:
        options = HostOptions("float32", "dense", kv_format, 512, 6000, 1 << 30, 1)
        placed = place_on_host(file, options)

    def answer():
        placed.model.reset(0)
        rows = SequenceRows(0, 5, 0, (0,), (0, 4))
        batch = ForwardBatch(torch.tensor([3, 1, 4, 1, 5]), torch.arange(5), (rows,))
        return placed.model.forward(batch, placed.pages)

    before = answer()
    costs = measure_step_costs(placed, most_rows=6)
    assert costs.rows == [1, 2, 4, 6]
    assert all(costs.step_ms(rows, length) > 0 for rows in range(1, 7) for length in (0, 5000))
    assert torch.equal(answer(), before)
