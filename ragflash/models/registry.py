"""Which class runs which architecture, and loading a model file with it."""

import importlib
from pathlib import Path
from typing import Literal, Protocol, cast

import torch

from ragflash.errors import ArchitectureUnknown, ModelError, SettingInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.models.contract import Model, SequenceShape
from ragflash.models.decoder import Decoder
from ragflash.models.packed import PACKABLE_FORMATS
from ragflash.models.weights import WeightForm

ARCHITECTURES = {
    "gemma3": "ragflash.models.gemma3:Gemma3",
    "gemma4": "ragflash.models.gemma4:Gemma4",
    "llama": "ragflash.models.llama:Llama",
    "qwen2": "ragflash.models.qwen2:Qwen2",
    "qwen3": "ragflash.models.qwen3:Qwen3",
    "qwen35": "ragflash.models.qwen35:Qwen35",
    "qwen35moe": "ragflash.models.qwen35moe:Qwen35Moe",
}

ComputeDtype = Literal["auto", "float32", "bfloat16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelClass(Protocol):
    """What the table's entries are."""

    def from_gguf(
        self,
        file: GGUFFile,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        form: WeightForm = "dense",
    ) -> Model:
        """Load the weights; raises a `ModelError` for a file that it cannot run."""

    def shape(self, file: GGUFFile) -> SequenceShape:
        """Say what the file's model keeps of a sequence, from its metadata alone."""


def model_class(architecture: str) -> ModelClass:
    """Import the class for GGUF's `general.architecture`; raises `ArchitectureUnknown`."""
    entry = ARCHITECTURES.get(architecture)
    if entry is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ArchitectureUnknown(
            f"the model file's architecture is {architecture!r}; ragflash runs: {known}"
        )
    module, _, name = entry.partition(":")
    return cast(ModelClass, getattr(importlib.import_module(module), name))


def load_model(
    file: GGUFFile,
    *,
    dtype: ComputeDtype = "auto",
    weights: WeightForm = "dense",
    device: torch.device | str = "cpu",
) -> Model:
    """Load a model file.

    Args:
        file: May be closed afterwards.
        dtype: What the model computes in; `auto` is bfloat16 where the CPU multiplies it in
            hardware, float32 elsewhere. The choice is the model's `compute_dtype`.
        weights: `dense` unpacks them; `packed` keeps 4-bit matrices as they are (`models.packed`).
        device: Where weights lie and the model runs.

    Raises:
        ModelError: The file cannot be run; the subclass and the text say why.
        SettingInvalid: There is nothing that can stay packed.
    """
    if weights == "packed":
        _require_packable(file, torch.device(device))
    architecture = file.require("general.architecture", str)
    if dtype == "auto":
        dtype = "bfloat16" if cpu_multiplies_bfloat16() else "float32"
    return model_class(architecture).from_gguf(
        file, dtype=_DTYPES[dtype], device=device, form=weights
    )


def load_records(file: GGUFFile, device: torch.device) -> Decoder:
    """Load a model file for `models.device`: matrices as records, keys and values in float16.

    Raises:
        ModelError: The file cannot be run on a card.
    """
    architecture = file.require("general.architecture", str)
    model = model_class(architecture).from_gguf(
        file, dtype=torch.float16, device=device, form="records"
    )
    if isinstance(model, Decoder):
        return model
    raise ModelError(f"a card does not run {architecture} files yet; choose --device cpu")


def _require_packable(file: GGUFFile, device: torch.device) -> None:
    formats = {tensor.type.name for tensor in file.tensors.values()}
    if device.type != "cpu" or formats.isdisjoint(PACKABLE_FORMATS):
        raise SettingInvalid(
            f"weights can stay packed on a CPU in a file of {' or '.join(PACKABLE_FORMATS)}; "
            f"{file.path.name} has {', '.join(sorted(formats))}: leave them dense"
        )


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has AVX512-BF16 or AMX; elsewhere bfloat16 is many times slower."""
    return bool(_cpu_flags() & {"avx512_bf16", "amx_bf16"})


def _cpu_flags() -> frozenset[str]:
    """Words of the kernel's description of the CPUs; none where there is no such file."""
    path = Path("/proc/cpuinfo")
    return frozenset(path.read_text(encoding="utf-8").split()) if path.exists() else frozenset()
