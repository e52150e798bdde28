"""llama.cpp through llama-cpp-python, if that is installed: what the engine is measured beside."""

import importlib
import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llama-cpp-python"


def is_installed() -> bool:
    """Whether there is a llama.cpp to measure beside."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCpp:
    """A model file in llama.cpp, with what that library takes if nothing is said.

    Args:
        path: A GGUF file.
        threads: For prompts and for decoding.
        context_tokens: Room for keys and values.
        batch_tokens: Most tokens that are computed at once.
    """

    def __init__(self, path: Path, *, threads: int, context_tokens: int, batch_tokens: int) -> None:
        # No stubs exist for a library that may be absent, so it is not typed here.
        self._library: Any = importlib.import_module("llama_cpp")
        self._llama: Any = self._library.Llama(
            model_path=str(path),
            n_ctx=context_tokens,
            n_batch=batch_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    @property
    def version(self) -> str:
        """Name and version of the package, and what it was compiled to use."""
        features = self._library.llama_print_system_info().decode()
        return f"{PACKAGE} {metadata.version(PACKAGE)} ({features.strip(' |')})"

    def forward(self, token_ids: Sequence[int], committed: int) -> int:
        """Compute tokens after the first `committed`; return the likeliest one to follow."""
        self._llama.n_tokens = committed
        self._llama.eval(token_ids)
        logits = self._library.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._llama.n_vocab(),)).argmax())

    def close(self) -> None:
        """Give back the memory."""
        self._llama.close()
