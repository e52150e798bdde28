"""What the tests on a card share. `RAGFLASH_TEST_DEVICE=cpu` runs them small, to try the tests."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("RAGFLASH_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = DEVICE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def empty_card() -> Iterator[None]:
    """Begin with what other tests left given back."""
    if DEVICE == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tests run."""
    return DEVICE


@pytest.fixture(scope="session")
def is_small() -> bool:
    """Whether to do only as much as a CPU can."""
    return DEVICE == "cpu"


def find_model(name: str, request: pytest.FixtureRequest) -> Path:
    """Return the file of a real model: by a path in the environment, else from its package."""
    given = os.environ.get(f"RAGFLASH_TEST_{name.upper()}")
    fixtures = {"smollm2": "packaged_model_path", "gemma": "gemma_model_path"}
    return Path(given) if given else request.getfixturevalue(fixtures[name])


@pytest.fixture
def model_path(request: pytest.FixtureRequest) -> Path:
    """One of the real models, by name."""
    return find_model(request.param, request)


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct."""
    return find_model("smollm2", request)
