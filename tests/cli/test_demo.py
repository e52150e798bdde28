from pathlib import Path

import pytest

from tests.api.fakes import FakeAnswerer


@pytest.fixture(autouse=True)
def small_story(monkeypatch, tmp_path: Path) -> list[FakeAnswerer]:
    """Two short texts in place of the documents, and an answerer that needs no model."""
    made: list[FakeAnswerer] = []

    def make(library, engine) -> FakeAnswerer:
        made.append(FakeAnswerer(library))
        return made[-1]

    def sample(name: str) -> Path:
        path = tmp_path / name
        path.write_text(f"This stands for {name} and says little.")
        return path

    monkeypatch.setattr("ragflash.cli.demo.sample_path", sample)
    monkeypatch.setattr("ragflash.rag.answer.Answerer", make)
    return made


def test_the_story_has_two_documents_and_five_questions(run, small_story, engine) -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n> ") == 5
    assert "“Records are kept for seven years.”\n      law.txt, page 1, Keeping" in result.stdout
    assert "10 of 40 prompt tokens were already read" in result.stdout
    assert "ragflash serve" in result.stdout
    modes = [request.mode for request in small_story[0].requests]
    assert modes == ["retrieve"] * 3 + ["full"] * 2
    assert engine.closed


def test_nothing_is_left_behind_unless_a_folder_is_named(run, data_dir, tmp_path) -> None:
    assert run("demo").exit_code == 0
    assert not data_dir.exists()
    kept = tmp_path / "kept"
    assert run("demo", "--data-dir", kept).exit_code == 0
    assert (kept / "library.sqlite").is_file()


def test_as_json_it_is_one_object(run_json) -> None:
    body = run_json("demo")
    assert [entry["name"] for entry in body["documents"]] == [
        "debian-policy.pdf",
        "bug-reporting.txt",
    ]
    assert len(body["answers"]) == 5
    assert body["second_question"]["cached_tokens"] == [10, 10]


def test_off_a_terminal_no_control_character_is_written(run) -> None:
    result = run("demo")
    assert not {char for char in result.output if ord(char) < 32} - {"\n"}
