"""Requests made up from the OpenAPI document: what it says is what the routes do, and no more."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.api.fakes import HEADERS, TEXT, World
from tests.api.real_world import real_world
from tests.rag.conftest import TextParser

# A question of white space and the name of another model have the documented shape.
TOO_STRICT = [positive_data_acceptance]
KNOWN = {"model_id": "ragflash"}


def read_document():
    world = World()
    world.library.close()
    return schemathesis.openapi.from_asgi("/openapi.json", world.app, headers=HEADERS)


schema = read_document()


@schema.hook
def before_generate_path_parameters(context, strategy):
    """Half of the time ask for what is there."""
    path = context.operation.path
    return (
        st.just({name: known for name, known in KNOWN.items() if f"{{{name}}}" in path}) | strategy
    )


def serve(world: World, document_id: str, job_id: str) -> None:
    session_id = world.sessions.add((document_id,))
    KNOWN.update(document_id=document_id, job_id=job_id, session_id=session_id)
    schema.app.state.services = world.services


@pytest.fixture(scope="module")
def fake() -> Iterator[World]:
    made = World()
    serve(made, made.add_text(), "job_1")
    yield made
    made.library.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("schema")
    with real_world(folder, TextParser(), max_upload_bytes=10_000) as world:
        files = {"file": ("law.txt", TEXT.encode())}
        added = world.send("POST", "/v1/documents?wait=30", files=files).json()
        serve(world, added["document"]["id"], added["job"]["id"])
        yield world


@schema.parametrize()
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
def test_routes_keep_to_their_document(case, fake: World):
    before = dict(fake.library.records), dict(fake.library.jobs), dict(fake.sessions.infos)
    case.call_and_validate(headers=HEADERS, excluded_checks=TOO_STRICT)
    fake.library.records, fake.library.jobs, fake.sessions.infos = before


@pytest.mark.slow
@schema.exclude(method="DELETE").parametrize()
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_the_real_library_behind_them_too(case, real: World):
    case.call_and_validate(headers=HEADERS, excluded_checks=TOO_STRICT)
