"""Toy models as programmes of a card, which a CPU runs by their plain forms."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVPages
from ragflash.models.contract import Model
from ragflash.models.device.model import DeviceModel
from ragflash.models.registry import load_records
from tests.models.families import FAMILIES, VOCAB_SIZE
from tests.models.forwards import PAGES, batch_of, load, poisoned_pages
from tests.models.toy_files import write_gguf

LOWERED = ("llama", "qwen2", "qwen3", "gemma3", "qwen35")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    """The same file as layers in float32, and as a programme with its pages."""

    path: Path
    layers: Model
    programme: DeviceModel
    pages: KVPages


def make_pair(
    name: str,
    folder: Path,
    chunk_counts: tuple[int, ...] = (),
    tap_layers: tuple[int, ...] | None = None,
) -> Pair:
    family = FAMILIES[name]
    path = folder / "toy.gguf"
    tensors = family.tensors(family.build(seed=1))
    write_gguf(path, family.architecture, family.metadata, tensors, quantized=True)
    with GGUFFile.open(path) as file:
        decoder = load_records(file, CPU)
    pages = poisoned_pages(decoder)
    programme = DeviceModel(
        decoder, CPU, pages, num_tokens=VOCAB_SIZE, max_slots=3, exact_pages=len(PAGES),
        packed_pages=0, chunk_tokens=300, chunk_counts=chunk_counts, tap_layers=tap_layers,
        dtype=torch.float32,
    )  # fmt: skip
    return Pair(path, load(path), programme, pages)


def feed(pair: Pair, text: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Compute a text in parts; return all logits."""
    logits, start = [], 0
    pair.programme.reset(0)
    for size in [*chunks, len(text)]:
        part = text[start : start + size]
        if part:
            logits.append(pair.programme.forward(batch_of(part, start), pair.pages).clone())
            pair.programme.commit(0, range(len(part)))
            start += len(part)
    return torch.cat(logits)


def assert_near(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """Differ by at most a share of how logits spread, in the root mean square."""
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error < share
