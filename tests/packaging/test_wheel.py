"""The wheel holds our four packages and nothing else, and gets on with Hugging Face's libraries."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "ragflash": ROOT,
    "ragflash_ingest": ROOT / "ingest",
    "ragflash_kernels": ROOT / "kernels",
    "ragflash_prompts": ROOT / "prompts",
}


def run_python(*arguments: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_source_files_and_nothing_else(wheel):
    expected = {
        str(path.relative_to(root))
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_wheel_holds_what_is_no_python(wheel):
    with ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    assert {"ragflash_prompts/rules.md", "ragflash/samples/questions.jsonl"} <= held
    assert "ragflash/samples/debian-policy.pdf" in held


def test_installed_wheel_imports_beside_transformers(wheel, tmp_path):
    run_python(
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-index", "--target", str(tmp_path), str(wheel)),
        cwd=tmp_path,
    )
    program = f"""
import {", ".join(PACKAGES)}
from ragflash.samples import sample_path
for package in ({", ".join(PACKAGES)}):
    assert package.__file__.startswith({str(tmp_path)!r}), package.__file__
assert ragflash_prompts.load("rules").text
assert sample_path("sqlite-wal.html").is_file()
import transformers, sentence_transformers
print("imported")
"""
    output = run_python("-P", "-c", program, cwd=Path("/"), PYTHONPATH=str(tmp_path))
    assert output.split()[-1] == "imported"


@pytest.mark.parametrize("folder", ["kernels", "ingest", "prompts"])
def test_source_roots_are_no_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists()
