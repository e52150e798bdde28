"""What a package names in `__all__` is there; ruff (RUF022) keeps these lists in order."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    ".".join(path.parent.relative_to(root).parts): path
    for root in (ROOT, ROOT / "kernels", ROOT / "ingest", ROOT / "prompts")
    for name in ("ragflash", "ragflash_kernels", "ragflash_ingest", "ragflash_prompts")
    for path in sorted((root / name).rglob("__init__.py"))
}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package):
    tree = ast.parse(PACKAGES[package].read_text(encoding="utf-8"))
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:
        assert not any(
            isinstance(node, ast.ImportFrom | ast.FunctionDef | ast.ClassDef) for node in tree.body
        ), f"{package} holds names and has no __all__"
        return
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(module, name)] == []
