from collections.abc import Iterator

import pytest

from tests.api.fakes import World


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.library.close()
