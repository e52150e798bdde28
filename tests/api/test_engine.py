"""Another model in place of the one that runs."""

from tests.api.fakes import World


def test_the_model_and_those_that_could_run_are_named(world: World) -> None:
    reply = world.send("GET", "/v1/engine").json()
    assert reply["engine"]["model"] == "tiny.gguf"
    assert reply["models"] == ["tiny.gguf", "own/large.gguf"]


def test_another_model_is_used_by_its_name(world: World) -> None:
    reply = world.send("PUT", "/v1/engine", json={"model": "own/large.gguf"})
    assert (reply.status_code, world.models.used) == (200, ["own/large.gguf"])
    assert reply.json()["engine"]["model"] == "tiny.gguf"


def test_what_cannot_be_used_is_refused_in_words(world: World) -> None:
    for name, status in (("none", 404), ("busy", 409)):
        reply = world.send("PUT", "/v1/engine", json={"model": name})
        assert (reply.status_code, reply.json()["detail"] != "") == (status, True)
    assert world.send("PUT", "/v1/engine", json={"file": "x"}).status_code == 422


def test_without_an_engine_chat_is_told_to_wait(world: World) -> None:
    world.services.withdraw_engine()
    assert world.send("GET", "/readyz").json()["missing"] == ["engine"]
    assert world.send("GET", "/v1/engine").json()["engine"] is None
    chat = {"model": "ragflash", "messages": [{"role": "user", "content": "q"}]}
    assert world.send("POST", "/v1/chat/completions", json=chat).status_code == 503
    world.services.provide_engine(world.engine, world.answerer)
    assert world.send("POST", "/v1/chat/completions", json=chat).status_code == 200


def test_before_a_model_is_there_none_can_be_exchanged() -> None:
    world = World(loaded=False)
    assert world.send("GET", "/v1/engine").status_code == 503
    assert world.send("PUT", "/v1/engine", json={"model": "x"}).status_code == 503
    world.library.close()
