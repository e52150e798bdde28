"""Every field of the identity follows something that stored bytes depend on, and nothing else."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ragflash.engine.identity
from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.identity import ModelText, identify
from ragflash.engine.placed import Placed
from ragflash.kvcache.allocator import PageAllocator, PageForm
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.identity import FORMAT_VERSION, Identity
from ragflash.kvcache.pages import KVLayout, KVPages, PackedPool, PagePool
from tests.engine.restarted import ask, engine_on
from tests.engine.toys import ToyRecurrentModel
from tests.models.families import FAMILIES
from tests.models.toy_files import write_toy

TEXT = ModelText(
    weights="w", architecture="a", rope={"a.rope.freq_base": 1e4}, tokenizer="t", template="{{x}}"
)
STATE = (torch.empty(3, 4), torch.empty(2, dtype=torch.float64))
LAYOUT = KVLayout.uniform(2, 1, 32, torch.float32)
OFFSETS = (torch.ones(1, 32), None)


@dataclass(frozen=True)
class Given:
    """What an identity is read off."""

    layout: KVLayout = LAYOUT
    kv_format: Any = "q8_0"
    offsets: Any = None
    grid_tokens: int = 512
    device: str = "cpu"
    computed_in: str = "float32"
    text: ModelText = TEXT
    state: tuple[torch.Tensor, ...] = STATE
    chunk_tokens: int = 512
    arithmetic: tuple[str, ...] = ("avx2", "1 threads")

    def identity(self) -> Identity:
        packed = PackedPool(self.layout, self.kv_format, 2, offsets=self.offsets)
        numbers = PageAllocator(2), PageAllocator(2, PageForm.PACKED)
        placed = Placed(
            ToyRecurrentModel(vocab_size=2),
            KVPages(PagePool(self.layout, 2), packed),
            PageAllocators(*numbers, Grid(self.grid_tokens)),
            device=self.device,
            arithmetic=self.computed_in,
        )
        return identify(
            placed,
            self.text,
            state_shapes=self.state,
            chunk_tokens=self.chunk_tokens,
            arithmetic=self.arithmetic,
        )


def of_text(**changed: Any) -> Given:
    return Given(text=replace(TEXT, **changed))


# What may differ between two engines, and all fields that it shows in.
CASES: dict[str, tuple[Given, set[str]]] = {
    "other weights": (of_text(weights="v"), {"weights"}),
    "another family": (of_text(architecture="b"), {"architecture"}),
    "another base": (of_text(rope={"a.rope.freq_base": 1e6}), {"rope"}),
    "scaling": (of_text(rope={**TEXT.rope, "a.rope.scaling.factor": 8.0}), {"rope"}),
    "another tokenizer": (of_text(tokenizer="u"), {"tokenizer"}),
    "another template": (of_text(template="{{x }}"), {"template"}),
    "another device": (Given(device="a card"), {"arithmetic"}),
    "another number format": (Given(computed_in="bfloat16"), {"arithmetic"}),
    "another way to compute": (Given(arithmetic=("avx2", "2 threads")), {"arithmetic"}),
    "other exact pages": (Given(layout=replace(LAYOUT, dtype=torch.bfloat16)), {"arithmetic"}),
    "other chunks": (Given(chunk_tokens=256), {"chunk_plan"}),
    "another format": (Given(kv_format="tq3_0"), {"key_format", "value_format", "codebook"}),
    "keys with offsets": (Given(offsets=OFFSETS), {"key_offsets"}),
    "another grid": (Given(grid_tokens=256), {"grid_tokens"}),
    "more layers": (Given(layout=KVLayout.uniform(3, 1, 32, torch.float32)), {"layer_plan"}),
    "more heads": (Given(layout=KVLayout.uniform(2, 2, 32, torch.float32)), {"layer_plan"}),
    "another state": (Given(state=(torch.empty(4, 3), STATE[1])), {"layer_plan"}),
    "a state of another type": (Given(state=(STATE[0], torch.empty(2))), {"layer_plan"}),
}
# Constants of the program: what they are raised for shows in the field.
CONSTANTS = {
    "PAGE_TOKENS": "page_tokens",
    "ROTATION_VERSION": "rotation",
    "ARITHMETIC_REVISION": "arithmetic",
}
# They count for parts of their own, which a prompt is used without.
OF_PARTS = {"drafter", "mtp"}
# No model says these: rules are tokens of every key already.
LEFT_OUT = {"rules": "", "format_version": FORMAT_VERSION}


def differing(one: Identity, other: Identity) -> set[str]:
    names = (field.name for field in fields(Identity))
    return {name for name in names if getattr(one, name) != getattr(other, name)}


@pytest.mark.parametrize("name", CASES)
def test_a_difference_shows_in_its_fields_alone(name):
    given, wanted = CASES[name]
    mine, other = Given().identity(), given.identity()
    assert differing(mine, other) == wanted
    assert mine.digest != other.digest
    assert mine.difference(other.named) in wanted


@pytest.mark.parametrize("name", sorted(OF_PARTS))
def test_another_drafter_shows_in_its_part_alone(name):
    mine, other = Given().identity(), of_text(**{name: "d"}).identity()
    assert differing(mine, other) == {name}
    assert (mine.digest, mine.difference(other.named)) == (other.digest, None)
    assert mine.of_part(name) != other.of_part(name)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_is_raised_shows_in_its_field(name, monkeypatch):
    mine = Given().identity()
    monkeypatch.setattr(ragflash.engine.identity, name, 77)
    assert differing(mine, Given().identity()) == {CONSTANTS[name]}


def test_another_torch_shows_in_the_arithmetic(monkeypatch):
    mine = Given().identity()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert differing(mine, Given().identity()) == {"arithmetic"}


def test_offsets_count_by_their_values_and_layers():
    hashes = {
        Given(offsets=offsets).identity().key_offsets
        for offsets in (None, OFFSETS, OFFSETS[::-1], (2 * OFFSETS[0], None), (OFFSETS[0],) * 2)
    }
    assert len(hashes) == 5
    assert Given(offsets=(None, None)).identity() == Given().identity()


def test_no_field_is_without_a_case():
    """A new field needs one above; the next test and the engine's misses take it by themselves."""
    seen = set.union(*(wanted for _, wanted in CASES.values())).union(CONSTANTS.values())
    assert seen | OF_PARTS | LEFT_OUT.keys() == {field.name for field in fields(Identity)}
    identity = Given().identity()
    assert {name: getattr(identity, name) for name in LEFT_OUT} == LEFT_OUT


@pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
def test_one_field_alone_makes_another_identity(name):
    mine = Given().identity()
    value = getattr(mine, name)
    other = replace(mine, **{name: value + 1 if isinstance(value, int) else f"{value}x"})
    differs = None if name in OF_PARTS else name
    assert mine.difference(other.named) == other.difference(mine.named) == differs
    assert (mine.digest == other.digest) == (name in OF_PARTS)


# How a whole engine may be started otherwise over the same files, and what its miss names.
STARTS: dict[str, dict[str, Any]] = {
    "chunk_plan": {"prefill_chunk_tokens": 64},
    "key_format": {"kv_format": "q8_0"},
    "grid_tokens": {"grid_tokens": 512},
    "tokenizer": {"pre_tokenizer": "llama-bpe"},
    "arithmetic": {"threads": 2},
    "weights": {},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("toys")
    paths = {seed: folder / f"{seed}.gguf" for seed in (1, 2)}
    for seed, path in paths.items():
        write_toy(path, FAMILIES["qwen3"], seed)
    return paths.__getitem__


def test_an_engine_that_is_started_otherwise_misses_and_says_why(toy, tmp_path):
    first = tmp_path / "first"
    with engine_on(toy(1), first) as (engine, _):
        assert ask(engine, 0, "What?").tier is CacheTier.NONE
    for field, options in STARTS.items():
        model = toy(2 if field == "weights" else 1)
        sessions = shutil.copytree(first, tmp_path / field)
        with engine_on(model, sessions, **options) as (engine, _):
            missed = ask(engine, 0, "What?")
            assert (missed.tier, missed.usage.cached_tokens) == (CacheTier.NONE, 0)
            assert (missed.miss_reason, missed.miss_field) == (CacheMiss.IDENTITY_DIFFERS, field)
            assert engine.stats().forward_rows >= missed.usage.prompt_tokens
    with engine_on(toy(1), first) as (engine, _):
        assert ask(engine, 0, "What?").tier is CacheTier.FILE
