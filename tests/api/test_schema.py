"""Requests made up from the OpenAPI document: what it says is what the routes do, and no more."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import schemathesis
from hypothesis import settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import DEFAULT_COLLECTION, Scope
from tests.api.fakes import HEADERS, TEXT, FakeAnswerer, World
from tests.rag.conftest import HashEmbedder, TextParser

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
    KNOWN.update(document_id=document_id, job_id=job_id)
    schema.app.state.services = world.services


@pytest.fixture(scope="module")
def fake() -> Iterator[World]:
    made = World()
    serve(made, made.add_text(), "job_1")
    yield made
    made.library.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[World]:
    world = World(loaded=False)
    config = LibraryConfig(tmp_path_factory.mktemp("schema"), max_upload_bytes=10_000)
    with closing(Library.open(config, HashEmbedder(), parser=TextParser())) as library:
        world.services.provide_library(library)
        world.services.provide_engine(world.engine, FakeAnswerer(library))
        scope = Scope(frozenset({DEFAULT_COLLECTION}))
        added = library.add(scope, DEFAULT_COLLECTION, "law.txt", TEXT.encode())
        library.wait(scope, added.job.id, 30)
        serve(world, added.document.id, added.job.id)
        yield world
    world.library.close()


@schema.parametrize()
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
def test_routes_keep_to_their_document(case, fake: World):
    before = dict(fake.library.records), dict(fake.library.jobs)
    case.call_and_validate(headers=HEADERS, excluded_checks=TOO_STRICT)
    fake.library.records, fake.library.jobs = before


@pytest.mark.slow
@schema.exclude(method="DELETE").parametrize()
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_the_real_library_behind_them_too(case, real: World):
    case.call_and_validate(headers=HEADERS, excluded_checks=TOO_STRICT)
