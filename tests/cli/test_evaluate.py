"""`eval` takes a folder or a built-in set, and tells languages apart where a set has several."""

import json


def write_set(folder, *languages: str) -> None:
    folder.mkdir()
    rows = []
    for language in languages:
        (folder / f"{language}.txt").write_text("Visitors wait outside of the office every day.")
        row = {"document": f"{language}.txt", "question": f"Where do visitors wait {language}?"}
        rows.append({**row, "answerable": True, "pages": [1], "language": language})
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_figures_are_given_for_each_language(run, run_json, tmp_path) -> None:
    write_set(tmp_path / "set", "ja", "de")
    body = run_json("eval", tmp_path / "set", "--engine", "none")
    assert list(body["languages"]) == ["de", "ja"]
    assert body["languages"]["de"].keys() == body["metrics"].keys()
    assert [row["language"] for row in body["rows"]] == ["ja", "de"]
    heading = run("eval", tmp_path / "set", "--engine", "none").stdout.splitlines()[0]
    assert heading.split() == ["figure", "all", "de", "ja"]


def test_a_folder_and_the_built_in_languages_exclude_each_other(run, tmp_path) -> None:
    result = run("eval", tmp_path, "--languages", "--engine", "none")
    assert result.exit_code != 0
    assert "leave FOLDER out" in result.stderr
