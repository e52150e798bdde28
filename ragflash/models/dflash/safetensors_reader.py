"""Tensors of a folder of safetensors files as what a model multiplies with."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from ragflash.errors import ModelError, ModelMissing, TensorMissing
from ragflash.models.layers import Norm
from ragflash.models.linear import DenseLinear, Embedding, Linear


class SafetensorsReader:
    """Reads tensors by name, checks their shapes, and knows which it was asked for.

    Args:
        folder: With `*.safetensors`, which are mapped until it is closed.
        dtype: Of matrices.
        device: Where tensors go.

    Raises:
        ModelMissing: There is none.
        ModelError: One is damaged, or a name stands in two.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._used: set[str] = set()
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelMissing(f"{folder} holds no safetensors file")
        for path in paths:
            self._map(path)

    def _map(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        names = set(file.keys())
        if twice := sorted(names & set(self._files)):
            raise ModelError(f"{path} holds {twice[0]!r}, and so does another file beside it")
        self._files.update(dict.fromkeys(names, file))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def has(self, name: str) -> bool:
        """See `TensorSource`."""
        return name in self._files

    def norm(self, name: str, size: int, eps: float) -> Norm:
        """See `TensorSource`."""
        return Norm(self.tensor(name, (size,)), eps)

    def linear(
        self, names: Sequence[str], *, in_features: int, out_features: Sequence[int]
    ) -> Linear:
        """See `TensorSource`."""
        parts = [
            self._stored(name, (size, in_features)).to(self._device, self._dtype)
            for name, size in zip(names, out_features, strict=True)
        ]
        return DenseLinear(torch.cat(parts))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `TensorSource`."""
        return self._stored(name, shape).to(self._device, torch.float32)

    def packed_embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """See `TensorSource`."""
        table = self._stored(name, (vocab_size, hidden_size))
        return Embedding(table.to(self._device, self._dtype))

    def require_all_used(self) -> None:
        """See `TensorSource`."""
        if unused := sorted(set(self._files) - self._used):
            raise ModelError(
                f"{self._folder} holds {len(unused)} tensors that this drafter does not use, among "
                f"them {', '.join(unused[:3])}"
            )

    def _stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise TensorMissing(f"{self._folder} has no tensor {name!r}")
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise TensorMissing(
                f"tensor {name!r} has shape {list(found)}, the configuration says {list(shape)}"
            )
        self._used.add(name)
        tensor: torch.Tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name!r} is stored as {tensor.dtype}, not as numbers")
        return tensor
