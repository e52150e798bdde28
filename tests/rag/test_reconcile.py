import pytest

from ragflash.errors import DataFolderLocked
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.points import PointWriter
from ragflash.rag.records import DocumentState, Scope

MINE = Scope(frozenset({"mine"}))
LONG = "\n\n".join(f"Part {n}. " + "Many words fill this part. " * 50 for n in range(6))


def index_of(library):
    return library._eraser._index


@pytest.fixture
def look(tmp_path, embedder):
    """Reconcile the closed folder; by default only look."""

    def run(*, dry_run=True):
        return Library.reconcile(LibraryConfig(tmp_path / "data"), embedder, dry_run=dry_run)

    return run


def test_nothing_is_found_after_ordinary_work(library, add, look):
    add("kept words")
    library.delete(MINE, add("deleted words"))
    library.close()
    assert look().is_clean


def test_an_open_folder_is_not_touched(library, look):
    with pytest.raises(DataFolderLocked):
        look()


def test_points_and_files_without_a_document_are_removed(library, add, look):
    orphan = add("orphan words")
    digest = library.get(MINE, orphan).sha256
    library._database.execute("DELETE FROM documents WHERE id = ?", orphan)
    library.close()
    for found in (look(), look(dry_run=False)):
        assert (found.orphan_points, found.orphan_files) == ((orphan,), (digest,))
    assert look().is_clean


def test_points_of_a_failed_document_are_removed(library, add, look):
    failed = add("some words")
    library._database.execute("UPDATE documents SET state = 'failed' WHERE id = ?", failed)
    library.close()
    assert look(dry_run=False).orphan_points == (failed,)
    assert look().is_clean


def test_a_deletion_that_had_begun_is_finished(library, add, look, tmp_path):
    doomed = add("doomed words")
    library._corpus.move(doomed, DocumentState.DELETING)
    library.close()
    found = look(dry_run=False)
    assert (found.erased, found.orphan_points) == ((doomed,), ())
    assert look().is_clean
    assert not [path for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file()]


def test_what_is_half_written_is_removed(library, look):
    staged = library._files.stage(b"half", 10)
    library.close()
    assert look().left_overs == (staged.path.name,)
    assert staged.path.exists()
    look(dry_run=False)
    assert not staged.path.exists()


@pytest.mark.parametrize("lost", ["all", "some", "too many"])
def test_a_document_whose_points_do_not_match_is_embedded_again(
    open_library, library, add, look, embedder, parser, lost
):
    document_id = add(LONG)
    chunks = library.get(MINE, document_id).chunks
    index = index_of(library)
    document, passages = library.get(MINE, document_id), library.chunks(MINE, document_id)
    points = PointWriter(index, embedder).points(document, passages)
    if lost != "too many":
        index.delete_document("mine", document_id)
    if lost == "some":
        index.upsert(points[2:])
    if lost == "too many":
        library._database.execute("DELETE FROM chunks WHERE position = ?", chunks - 1)
        library._database.execute("UPDATE documents SET chunks = chunks - 1")
    library.close()

    assert look(dry_run=False).requeued == (document_id,)

    again = open_library()
    job = again._jobs.of_document(document_id)
    assert again.wait(MINE, job.id, 30).state.value == "done"
    document = again.get(MINE, document_id)
    assert document.state is DocumentState.READY
    assert index_of(again).count("mine", document_id) == document.chunks
    assert parser.parsed == ["a.txt"]
    again.close()
    assert look().is_clean


def test_a_start_embeds_again_what_lost_all_its_points(open_library, library, add):
    document_id = add("some words")
    index_of(library).delete_document("mine", document_id)
    library.close()
    again = open_library()
    assert again.wait(MINE, again._jobs.of_document(document_id).id, 30).state.value == "done"
    assert again.search(MINE, "words")


def test_a_document_whose_text_is_gone_is_parsed_again(open_library, library, add, look, tmp_path):
    document_id = add("some words")
    library.close()
    (stored,) = (tmp_path / "data").glob("parsed/*/*/*/document.json")
    stored.unlink()
    assert look(dry_run=False).requeued == (document_id,)
    again = open_library()
    assert again.wait(MINE, again._jobs.of_document(document_id).id, 30).state.value == "done"
    assert again.document(MINE, document_id).text == "some words"


def test_a_document_that_nobody_works_on_gets_a_job(open_library, library, parser, look):
    parser.gate.clear()
    document_id = library.add(MINE, "mine", "a.txt", b"some words").document.id
    library.close()
    parser.gate.set()
    library = open_library(parser=type(parser)())
    library.close()
    again = open_library()
    again._database.execute("DELETE FROM jobs")
    again._database.execute("UPDATE documents SET state = 'parsing'")
    again.close()
    assert look().requeued == (document_id,)
    last = open_library()
    assert last.wait(MINE, last._jobs.of_document(document_id).id, 30).state.value == "done"


def test_an_original_that_is_gone_is_told(library, add, look):
    document_id = add("some words")
    library.content_path(MINE, document_id).unlink()
    library.close()
    assert look(dry_run=False).lost == (document_id,)
    assert look().lost == (document_id,)
