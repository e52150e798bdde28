import logging

from ragflash.api.app import create_app
from ragflash.errors import ModelMissing
from tests.api.fakes import INFO, FakeAnswerer, World


def test_ready_only_when_everything_is_there(world: World) -> None:
    bare = World(loaded=False)
    reply = bare.send("GET", "/readyz")
    assert (reply.status_code, reply.json()["missing"]) == (503, ["library", "engine"])
    assert reply.headers["retry-after"] == "5"
    bare.services.provide_library(bare.library)
    assert bare.send("GET", "/readyz").json()["missing"] == ["engine"]
    bare.services.provide_engine(bare.engine, FakeAnswerer(bare.library))
    assert bare.send("GET", "/readyz").json() == {"ready": True, "missing": [], "detail": None}
    bare.library.close()


def test_parts_that_are_there_work_before_the_others() -> None:
    world = World(loaded=False)
    assert world.send("GET", "/v1/documents").status_code == 503
    assert world.send("GET", "/healthz").json() == {"status": "alive"}
    world.services.provide_library(world.library)
    assert world.send("GET", "/v1/documents").status_code == 200
    reply = world.send("POST", "/v1/ask", json={"question": "q"})
    assert (reply.status_code, reply.json()["code"]) == (503, "not_ready")
    assert reply.headers["retry-after"] == "5"
    world.library.close()


def test_a_dead_engine_is_not_ready(world: World) -> None:
    world.engine.is_alive = False
    reply = world.send("GET", "/readyz")
    assert (reply.status_code, reply.json()["missing"]) == (503, ["engine"])
    assert "restart" in reply.json()["detail"]


def test_what_keeps_a_part_from_coming_is_told(world: World) -> None:
    bare = World(loaded=False)
    bare.services.fail(ModelMissing("there is no model file"))
    assert bare.send("GET", "/readyz").json()["detail"] == "there is no model file"
    assert bare.send("GET", "/v1/documents").json()["code"] == "model_missing"
    bare.library.close()


def test_version_says_what_runs(world: World) -> None:
    engine = world.send("GET", "/version").json()["engine"]
    assert (engine["model"], engine["context_tokens"]) == (INFO.model, INFO.context_tokens)
    bare = World(loaded=False)
    assert bare.send("GET", "/version").json()["engine"] is None
    bare.library.close()


async def run_lifespan(app) -> None:
    async with app.router.lifespan_context(app):
        pass


def test_starting_runs_beside_and_its_failure_is_kept(world: World, caplog) -> None:
    import asyncio

    def start() -> None:
        raise RuntimeError("secret cause")

    with caplog.at_level(logging.ERROR):
        asyncio.run(run_lifespan(create_app(world.services, start)))
    assert "secret cause" in caplog.text
    assert "secret" not in str(world.services.failure)
