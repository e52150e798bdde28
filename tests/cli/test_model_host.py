"""A server's model is exchanged over the same documents."""

import threading
from dataclasses import replace

import pytest

from ragflash.api.app import api_config
from ragflash.api.deps import Services
from ragflash.api.problems import NotReady
from ragflash.cli.model_host import ModelHost
from ragflash.cli.parts import EngineSlot, open_library
from ragflash.errors import Conflict, ModelMissing, NotFound
from ragflash.settings import load_settings
from tests.cli.conftest import ClosableEngine


class Engine(ClosableEngine):
    """Says what it was started with, and is busy as long as it is told."""

    def __init__(self, path) -> None:
        super().__init__()
        self.path = path
        self.busy_looks = 0

    def stats(self):
        self.busy_looks = max(0, self.busy_looks - 1)
        return replace(super().stats(), queued=0, running=self.busy_looks)


class Made:
    """A host, and the engines that it started."""

    def __init__(self, settings, library, monkeypatch) -> None:
        self.engines: list[Engine] = []
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.slot = EngineSlot()
        self.services = Services(api_config(settings))
        monkeypatch.setattr("ragflash.cli.model_host.start_model", self.start)
        self.host = ModelHost(settings, self.services, library, self.slot, None)

    def start(self, settings, archive):
        assert self.gate.wait(10)
        assert all(engine.closed for engine in self.engines), "two models at once"
        if settings.model.name in self.broken:
            raise ModelMissing("it cannot be read")
        self.engines.append(Engine(settings.model))
        return self.engines[-1]

    @property
    def running(self) -> str:
        assert self.slot.client is self.services.engine
        return self.slot.client.path.name


@pytest.fixture
def made(data_dir, monkeypatch):
    for name in ("one.gguf", "many-00001-of-00002.gguf", "many-00002-of-00002.gguf"):
        path = data_dir / "models" / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
    settings = load_settings()
    library = open_library(settings)
    yield Made(settings, library, monkeypatch)
    library.close()


def test_models_are_named(made):
    assert {"model.gguf", "own/one.gguf", "own/many-00001-of-00002.gguf"} <= {*made.host.names()}
    assert not any("00002-of" in name for name in made.host.names())


def test_another_model_takes_the_place_of_the_first(made):
    made.host.start()
    assert made.running == "model.gguf"
    made.engines[0].busy_looks = 3
    made.host.use("own/one.gguf")
    assert made.running == "one.gguf"
    assert (made.engines[0].closed, made.engines[0].busy_looks) == (True, 0)
    made.host.use("model.gguf")
    assert made.running == "model.gguf"
    made.host.close()
    assert made.engines[-1].closed


def test_a_model_that_cannot_be_used_leaves_the_one_before(made):
    made.host.start()
    made.broken.add("one.gguf")
    with pytest.raises(Conflict, match=r"the model before runs again: it cannot be read"):
        made.host.use("own/one.gguf")
    assert made.running == "model.gguf"
    assert not made.engines[-1].closed
    with pytest.raises(NotFound, match="GET /v1/engine"):
        made.host.use("../secret.gguf")
    assert made.running == "model.gguf"


def test_when_no_model_can_be_used_any_more_the_server_says_why(made):
    made.host.start()
    made.broken |= {"one.gguf", "model.gguf"}
    with pytest.raises(ModelMissing):
        made.host.use("own/one.gguf")
    with pytest.raises(ModelMissing, match="cannot be read"):
        _ = made.services.engine
    made.broken.clear()
    made.host.use("own/one.gguf")
    assert made.running == "one.gguf"


def test_one_model_is_loaded_at_a_time_and_none_serves_meanwhile(made):
    made.host.start()
    made.gate.clear()
    loading = threading.Thread(target=made.host.use, args=("own/one.gguf",))
    loading.start()
    while not made.engines[0].closed:
        threading.Event().wait(0.01)
    with pytest.raises(NotReady):
        _ = made.services.engine
    with pytest.raises(Conflict):
        made.host.use("model.gguf")
    made.gate.set()
    loading.join(10)
    assert made.running == "one.gguf"


def test_an_engine_that_does_not_end_is_ended(made, monkeypatch):
    monkeypatch.setattr("ragflash.cli.model_host._GRACE_S", 0.2)
    made.host.start()
    made.engines[0].busy_looks = 10_000
    made.host.use("own/one.gguf")
    assert made.engines[0].closed
    assert made.running == "one.gguf"
