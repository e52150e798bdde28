from ragflash.cli.parts import SCOPE, library_and_engine
from ragflash.rag.records import DEFAULT_COLLECTION, DuplicatePolicy
from ragflash.settings import load_settings


def test_the_engine_forgets_what_is_deleted_or_replaced(engine, law) -> None:
    with library_and_engine(load_settings()) as (library, client):
        assert client is engine
        first = library.add(SCOPE, DEFAULT_COLLECTION, "law.txt", law)
        library.wait(SCOPE, first.job.id, 30)
        second = library.add(SCOPE, DEFAULT_COLLECTION, "law.txt", law, DuplicatePolicy.REPLACE)
        library.wait(SCOPE, second.job.id, 30)
        library.delete(SCOPE, second.document.id)
        assert engine.dropped == [first.document.source_id, second.document.source_id]
    assert engine.closed
