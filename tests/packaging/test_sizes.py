"""Files and functions stay small, and names say something."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path
    for folder in ("ragflash", "kernels", "ingest", "prompts", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "common", "misc"}


def list_long_functions(source: str) -> list[str]:
    return [
        f"{node.name} at line {node.lineno}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def test_the_measure_counts_every_line_of_a_function():
    body = "    pass\n" * (MAX_FUNCTION_LINES - 1)
    assert list_long_functions("def fits():\n" + body) == []
    assert list_long_functions("def long():\n" + body + "    pass\n") != []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_small_and_named(path):
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= MAX_FILE_LINES
    assert list_long_functions(source) == []
    assert not EMPTY_NAMES & {path.stem, *path.relative_to(ROOT).parts}
