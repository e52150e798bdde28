import math
from dataclasses import fields, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragflash import metrics
from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.stats import EngineStats
from tests.api.fakes import World

SECRET = "Who embezzled the harbour fund?"


def families(world: World):
    reply = world.send("GET", "/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == metrics.CONTENT_TYPE
    return list(text_string_to_metric_families(reply.text))


def samples(world: World) -> dict[tuple[str, ...], float]:
    """Every number, by its name and the values of its labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(world)
        for sample in family.samples
    }


def grown(world: World, *key: str, by) -> float:
    """Say how much a number grows while `by` is called."""
    before = samples(world).get(key, 0.0)
    by()
    return samples(world)[key] - before


def test_every_name_occurs_once(world: World) -> None:
    names = [family.name for family in families(world)]
    assert len(names) == len(set(names)) > 20
    assert all(name.startswith("ragflash_") for name in names)


def test_the_engine_tells_what_it_does(world: World) -> None:
    assert list(metrics.ENGINE_METRICS) == [field.name for field in fields(EngineStats)]
    told = samples(world)
    sources = {"drafted_tokens": ("lookup",), "accepted_tokens": ("lookup",)}
    values = [
        told[name, *sources.get(field, ())]
        for field, (_, name, _) in metrics.ENGINE_METRICS.items()
    ]
    assert values == [*range(1, 17)]
    assert told["ragflash_ready",] == 1


@pytest.mark.parametrize(
    ("method", "path", "route", "status"),
    [
        ("GET", "/version", "/version", "200"),
        ("GET", "/v1/documents/doc_9", "/v1/documents/{document_id}", "404"),
        ("GET", "/no/such/route", "other", "404"),
        ("BREW", "/no/such/route", "other", "404"),
    ],
)
def test_requests_are_counted_by_pattern(world: World, method, path, route, status) -> None:
    shown = method if route != "other" else "other"
    key = ("ragflash_http_requests_total", shown, route, status)
    assert grown(world, *key, by=lambda: world.send(method, path)) == 1
    timed = ("ragflash_http_request_seconds_count", route)
    assert grown(world, *timed, by=lambda: world.send(method, path)) == 1


def test_faults_count_as_500(world: World) -> None:
    world.library.failure = ZeroDivisionError()
    key = ("ragflash_http_requests_total", "POST", "/v1/documents", "500")
    body = {"text": "a", "name": "b"}
    assert grown(world, *key, by=lambda: world.send("POST", "/v1/documents", json=body)) == 1


def test_documents_and_jobs_by_state(world: World) -> None:
    world.add_text()
    told = samples(world)
    assert told["ragflash_documents", "queued"] == 1
    assert told["ragflash_jobs", "queued"] == 1


def test_first_tokens_are_timed(world: World) -> None:
    def chat() -> None:
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": "ragflash", "messages": messages, "n": 2}
        assert world.send("POST", "/v1/chat/completions", json=body).status_code == 200

    assert grown(world, "ragflash_first_token_seconds_count", by=chat) == 2


def test_labels_hold_nothing_of_documents_or_questions(world: World) -> None:
    document_id = world.add_text("The harbour fund was embezzled.", name="harbour.txt")
    world.send("POST", "/v1/ask", json={"question": SECRET, "documents": [document_id]})
    world.send("GET", f"/v1/documents/{document_id}/text?page=1")
    world.send("GET", f"/{SECRET}")
    shown = world.send("GET", "/metrics").text
    for word in ("harbour", "embezzled", document_id):
        assert word not in shown


def test_session_files_are_counted(world: World) -> None:
    world.sessions.add(())
    told = samples(world)
    counted = {field: name for field, (_, name, _) in metrics.SESSION_METRICS.items()}
    refused = counted.pop("refused")
    assert [told[name,] for name in counted.values()] == [
        *(1, 8192, 1 << 20, 8192, math.inf, 3, 5, 1e6, 1, 2, 4),
    ]
    assert (told[refused, "quota"], told[refused, "write_budget"]) == (3, 0)


@pytest.mark.parametrize("reason", CacheMiss)
def test_prompts_are_counted_by_tier_and_misses_by_reason(world: World, reason: CacheMiss) -> None:
    def chat() -> None:
        body = {"model": "ragflash", "messages": [{"role": "user", "content": "Hello"}]}
        reply = world.send("POST", "/v1/chat/completions", json=body)
        assert reply.json()["miss_reason"] == reason.value

    restored = {"tier": CacheTier.FILE, "miss_reason": reason}
    world.engine.script[-1] = replace(world.engine.script[-1], **restored)
    assert grown(world, "ragflash_prompts_total", "file", by=chat) == 1
    assert grown(world, "ragflash_prompt_misses_total", reason.value, by=chat) == 1


def test_what_is_not_loaded_is_left_out() -> None:
    bare = World(loaded=False)
    names = {family.name for family in families(bare)}
    assert {"ragflash_ready", "ragflash_http_requests"} <= names
    assert not {"ragflash_sequences_running", "ragflash_documents", "ragflash_sessions"} & names
    bare.library.close()
