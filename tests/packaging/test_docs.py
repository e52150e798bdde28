"""What the documents claim about settings, files and versions is true."""

import re
import tomllib
from pathlib import Path

import pytest

import ragflash
from ragflash.settings import Settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "kernels").glob("*.md")]
)
SETTING = re.compile(r"RAGFLASH_[A-Z0-9_]*[A-Z0-9]")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def list_anchors(markdown: str) -> set[str]:
    """Anchors that a Git host gives to the headings of a file."""
    titles = HEADING.findall(FENCE.sub("", markdown))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def list_dead_links(document: Path) -> list[str]:
    dead = []
    for link in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path) if path else document
        lost = anchor and target.suffix == ".md" and target.exists()
        if not target.exists() or (
            lost and anchor not in list_anchors(target.read_text(encoding="utf-8"))
        ):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_inside_the_repository_resolve(document):
    assert list_dead_links(document) == []


def test_a_dead_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](#one-two) [b](#three) [c](none.md) [d](https://x.org)\n")
    assert list_dead_links(page) == ["#three", "none.md"]


def test_readme_has_a_row_for_every_setting():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.lstrip().startswith("|")]
    documented = set(SETTING.findall("\n".join(rows)))
    assert documented == {f"RAGFLASH_{name.upper()}" for name in Settings.model_fields}


@pytest.mark.parametrize("name", ["compose.yaml", "Dockerfile", ".env.example", "README.md"])
def test_files_name_only_settings_that_exist(name):
    known = {f"RAGFLASH_{field.upper()}" for field in Settings.model_fields}
    assert set(SETTING.findall((ROOT / name).read_text(encoding="utf-8"))) <= known


def test_the_version_is_one_and_has_a_changelog_entry():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert ragflash.__version__ == project["version"]
    entries = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] in {"Unreleased", project["version"]}
