from ragflash.rag.library import Library, LibraryConfig
from tests.rag.conftest import HashEmbedder

KEPT = ("erased", "orphan_points", "orphan_files", "left_overs", "requeued", "lost")


def test_a_folder_in_line_says_so(run, run_json, law):
    run("ingest", law)
    assert run_json("reconcile") == {"dry_run": False, **{name: [] for name in KEPT}}
    assert run("reconcile").stdout == "everything is in line\n"


def test_a_dry_run_shows_and_changes_nothing(run, run_json, law, data_dir):
    run("ingest", law)
    left_over = data_dir / "incoming" / "half"
    left_over.write_bytes(b"x")
    assert run_json("reconcile", "--dry-run")["left_overs"] == ["half"]
    assert left_over.exists()
    assert run("reconcile").stdout == "1 half-written files: removed\n  half\n"
    assert not left_over.exists()


def test_a_folder_in_use_is_locked(run, data_dir):
    library = Library.open(LibraryConfig(data_dir), HashEmbedder())
    result = run("reconcile")
    library.close()
    assert result.exit_code == 4
