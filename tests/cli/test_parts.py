import pytest

from ragflash.cli.parts import SCOPE, library_and_engine
from ragflash.rag.records import DEFAULT_COLLECTION, DuplicatePolicy
from ragflash.settings import load_settings
from tests.sessions.samples import DOCUMENT, RULES, open_folder
from tests.sessions.test_deletion import CANARY, OTHER, files_with, store_mark


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


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_no_byte_of_what_is_deleted_or_replaced_stays_in_session_files(
    is_open, is_replaced, engine, law, data_dir, monkeypatch
) -> None:
    """Whether an engine has the files open, or a command runs without one, or none are kept now."""
    with library_and_engine(load_settings()) as (library, _):
        added = library.add(SCOPE, DEFAULT_COLLECTION, "law.txt", law)
        library.wait(SCOPE, added.job.id, 30)
        source_id = added.document.source_id
    folder = open_folder(data_dir / "sessions")
    assert store_mark(folder, RULES, mark=OTHER) is None
    assert store_mark(folder, RULES, DOCUMENT, mark=CANARY, source_ids=[source_id]) is None
    folder.close()
    assert len(files_with(data_dir, CANARY)) == 1
    if not is_open:
        monkeypatch.setenv("RAGFLASH_SESSIONS_GB", "0")
    with library_and_engine(load_settings(), with_engine=is_open) as (library, _):
        if is_replaced:
            replace = DuplicatePolicy.REPLACE
            second = library.add(SCOPE, DEFAULT_COLLECTION, "law.txt", law, replace)
            library.wait(SCOPE, second.job.id, 30)
        else:
            library.delete(SCOPE, added.document.id)
            assert files_with(data_dir, CANARY) == []
    with library_and_engine(load_settings(), with_engine=False):  # finishes what was interrupted
        assert files_with(data_dir, CANARY) == []
        assert len(files_with(data_dir, OTHER)) == 1


@pytest.mark.parametrize(("draft", "num_indexes"), [("auto", 1), ("off", 0)])
def test_documents_are_indexed_where_answers_are_drafted(draft, num_indexes, tmp_path, data_dir):
    text = tmp_path / "rules.txt"
    text.write_text("Records are kept for seven years. " * 9)
    with library_and_engine(load_settings(draft=draft), with_engine=False) as (library, _):
        added = library.add(SCOPE, DEFAULT_COLLECTION, "rules.txt", text)
        library.wait(SCOPE, added.job.id, 30)
        assert library.get(SCOPE, added.document.id).tokens == 54
    assert len([*data_dir.rglob("*.lookup")]) == num_indexes
