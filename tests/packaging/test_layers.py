"""Imports point one way: `api → agent → rag → {compress, sessions} → engine → … → gguf`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = (ROOT, ROOT / "kernels", ROOT / "ingest", ROOT / "prompts")
OURS = ("ragflash", "ragflash_kernels", "ragflash_ingest", "ragflash_prompts")

RANKS = {
    "gguf": 0,
    "kvcache": 1,
    "models": 2,
    "speculative": 3,
    "engine": 4,
    "compress": 5,
    "sessions": 5,
    "rag": 6,
    "agent": 7,
    "api": 8,
    "bench": 9,
    "cli": 10,
    "__main__": 11,
}
FOR_ALL = {"errors", "log", "metrics"}
# What a bare GPU machine has, so that the engine can be measured there from a clone; llguidance is
# imported when a grammar is asked for.
ENGINE_LIBRARIES = {
    *("torch", "triton", "numpy", "tokenizers", "jinja2", "safetensors", "gguf"),
    *("llguidance", "typer", "rich", "ragflash", "ragflash_kernels", "ragflash_prompts"),
}


def list_modules() -> Iterator[tuple[str, Path]]:
    for root in SOURCE_ROOTS:
        for package in OURS:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__"), path


def list_imports(module: str, path: Path) -> set[str]:
    """Dotted names that a module imports, at its top or inside functions."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).strip(".")
            found.add(base)
            if base == "ragflash":
                found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def explain_fault(module: str, target: str) -> str | None:
    """Say which rule an import breaks, or return `None`."""
    package, own = module.partition(".")[0], layer_of(module)
    top = target.partition(".")[0]
    fault = None
    if package != "ragflash":
        if top in OURS and top != package:
            fault = "kernels, ingest and prompts import no other package of ours"
    elif is_engine_side(own) and top not in sys.stdlib_module_names | ENGINE_LIBRARIES:
        fault = f"from engine rightwards only {sorted(ENGINE_LIBRARIES)} are imported"
    elif top == "ragflash_ingest" and own not in {"rag", "bench", "cli"}:
        fault = "only rag, bench and cli import ragflash_ingest"
    elif top == "ragflash" and target != "ragflash":
        fault = explain_layer_fault(module, own, layer_of(target))
    return fault


def is_engine_side(layer: str) -> bool:
    return layer in RANKS and RANKS[layer] <= RANKS["engine"]


def explain_layer_fault(module: str, own: str, other: str) -> str | None:
    if other in FOR_ALL or other == own or other.startswith("__version"):
        return None
    if other == "settings":
        allowed = own == "cli" or module == "ragflash.api.app"
        return None if allowed else "only cli and api.app import settings"
    if other == "samples":
        return None if own in {"cli", "rag"} else "only cli and rag import samples"
    if own not in RANKS:
        return f"{own} belongs to no layer and imports only {sorted(FOR_ALL)}"
    if RANKS.get(other, 99) >= RANKS[own]:
        return f"{own} may not import {other}: the arrows point the other way"
    return None


MODULES = dict(list_modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module):
    faults = {
        target: fault
        for target in sorted(list_imports(module, MODULES[module]))
        if (fault := explain_fault(module, target))
    }
    assert faults == {}


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("ragflash.gguf.reader", "ragflash.kvcache.pages"),
        ("ragflash.engine.core", "ragflash.rag.index"),
        ("ragflash.sessions.store", "ragflash.compress.spans"),
        ("ragflash.rag.index", "ragflash.settings"),
        ("ragflash.api.routes.ask", "ragflash.bench.record"),
        ("ragflash.bench.ask", "ragflash.settings"),
        ("ragflash.api.deps", "ragflash.settings"),
        ("ragflash.api.routes.ask", "ragflash.samples"),
        ("ragflash.api.routes.documents", "ragflash_ingest.document"),
        ("ragflash.models.llama", "transformers"),
        ("ragflash.models.llama", "ragflash_ingest"),
        ("ragflash.errors", "ragflash.engine"),
        ("ragflash.settings", "ragflash.engine"),
        ("ragflash_kernels.rope", "ragflash.errors"),
        ("ragflash_ingest.pool", "ragflash_kernels"),
    ],
)
def test_the_rules_refuse(module, target):
    assert explain_fault(module, target) is not None


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("ragflash.engine.core", "ragflash.models.llama"),
        ("ragflash.engine.core", "ragflash_kernels"),
        ("ragflash.gguf.reader", "ragflash.errors"),
        ("ragflash.cli", "ragflash.settings"),
        ("ragflash.bench.ingest", "ragflash_ingest.pool"),
        ("ragflash.bench.ask", "ragflash.rag.answer"),
        ("ragflash.api.app", "ragflash.settings"),
        ("ragflash.rag.corpus", "ragflash_ingest"),
        ("ragflash.rag.embed", "sentence_transformers"),
    ],
)
def test_the_rules_allow(module, target):
    assert explain_fault(module, target) is None


def test_relative_and_named_imports_are_resolved(tmp_path):
    path = tmp_path / "core.py"
    path.write_text("from . import worker\nfrom ..models import llama\nfrom ragflash import log\n")
    found = list_imports("ragflash.engine.core", path)
    assert {"ragflash.engine", "ragflash.models", "ragflash.log"} <= found


def test_the_api_comes_up_without_torch():
    program = "import sys, ragflash.api.app; sys.exit('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(map(str, SOURCE_ROOTS)), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr or "torch was imported"
