import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.api.fakes import CONFIG, World

KEY = "correct-horse-battery"
QUESTION = {"question": "How long?"}


@pytest.fixture
def locked() -> Iterator[World]:
    made = World(replace(CONFIG, api_key=KEY))
    yield made
    made.library.close()


def all_routes() -> list[tuple[str, str]]:
    world = World()
    world.library.close()
    described = [
        (method.upper(), re.sub(r"\{.*?\}", "some", path))
        for path, methods in world.app.openapi()["paths"].items()
        for method in methods
    ]
    assert len(described) >= 18
    return [*described, ("GET", "/openapi.json"), ("GET", "/unknown"), ("PATCH", "/v1/ask")]


@pytest.mark.parametrize(("method", "path"), all_routes(), ids=lambda part: part)
def test_every_route_but_liveness_needs_the_key(locked: World, method: str, path: str) -> None:
    reply = locked.send(method, path)
    if path == "/healthz":
        assert reply.status_code == 200
    else:
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert KEY not in reply.text


@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}], ids=["bearer", "x-api-key"]
)
def test_key_is_taken_in_both_headers(locked: World, headers: dict[str, str]) -> None:
    assert locked.send("POST", "/v1/ask", json=QUESTION, headers=headers).status_code == 200


@pytest.mark.parametrize("given", ["correct-horse", KEY + "x", "ключ", ""])
def test_wrong_key_is_refused(locked: World, given: str) -> None:
    headers = {"x-api-key": given.encode()}
    assert locked.send("POST", "/v1/ask", json=QUESTION, headers=headers).status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "LOCALHOST:1"])
def test_own_names_are_served(world: World, host: str) -> None:
    assert world.send("GET", "/version", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "[::1", ""])
def test_foreign_names_are_refused(world: World, host: str) -> None:
    reply = world.send("GET", "/version", headers={"host": host})
    assert (reply.status_code, reply.json()["code"]) == (403, "request_refused")


def test_any_name_is_served_where_none_is_listed() -> None:
    world = World(replace(CONFIG, allowed_hosts=None))
    assert world.send("GET", "/version", headers={"host": "ragflash.lan"}).status_code == 200
    world.library.close()


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:3000", "null"])
def test_pages_of_other_sites_are_refused(world: World, origin: str) -> None:
    reply = world.send("POST", "/v1/ask", json=QUESTION, headers={"origin": origin})
    assert reply.status_code == 403
    assert not any(name.startswith("access-control") for name in reply.headers)
    assert world.answerer.started == 0


def test_pages_of_this_server_are_served(world: World) -> None:
    headers = {"origin": "http://127.0.0.1:8000"}
    assert world.send("POST", "/v1/ask", json=QUESTION, headers=headers).status_code == 200


def test_request_id_is_taken_or_made(world: World) -> None:
    taken = world.send("GET", "/healthz", headers={"x-request-id": "trace-1"})
    assert taken.headers["x-request-id"] == "trace-1"
    made = {world.send("GET", "/healthz").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2


@pytest.mark.parametrize("given", ["a" * 65, "a b", "a=b"])
def test_request_id_that_could_forge_log_lines_is_replaced(world: World, given: str) -> None:
    reply = world.send("GET", "/v1/documents/none", headers={"x-request-id": given})
    assert reply.headers["x-request-id"] != given
    assert reply.json()["request_id"] == reply.headers["x-request-id"]
