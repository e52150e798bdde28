"""What stored keys and values depend on besides tokens, read off a loaded model."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ragflash.engine.placed import Placed
from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.kvcache.identity import Identity
from ragflash.kvcache.pages import PackedPool
from ragflash_kernels.kv_codec import ROTATION_VERSION

ARITHMETIC_REVISION = 7
"""To be raised with every change to models or kernels that changes a bit of keys or values."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """What a file says of a model beside its weights.

    Attributes:
        weights: Content hash of the file.
        architecture: Its family, as the file names it.
        rope: The file's values of the rotary embedding.
        tokenizer: Hash of the vocabulary and its rules.
        template: Source of the chat template.
        drafter: Content hash of the drafter's files; empty without one.
        mtp: Of the model's file where its block of multi-token prediction is used, else empty.
    """

    weights: str
    architecture: str
    rope: Mapping[str, object]
    tokenizer: str
    template: str
    drafter: str = ""
    mtp: str = ""


def identify(
    placed: Placed,
    text: ModelText,
    *,
    state_shapes: Iterable[torch.Tensor],
    chunk_tokens: int,
    arithmetic: Iterable[str] = (),
) -> Identity:
    """Name all that a placed model's keys, values and states depend on.

    Args:
        placed: The model and its pages.
        text: What its file says.
        state_shapes: Tensors like those of a snapshot.
        chunk_tokens: Most of a prompt in one step.
        arithmetic: How it was asked to compute, as far as bits depend on it.
    """
    layout, packed, grid = placed.pages.exact.layout, placed.pages.packed, placed.allocators.grid
    exact_format = str(layout.dtype).removeprefix("torch.")
    kv_format = exact_format if packed is None else str(packed.kv_format)
    shapes = [(tuple(state.shape), str(state.dtype)) for state in state_shapes]
    computed = (placed.device, placed.arithmetic, exact_format, f"torch {torch.__version__}")
    return Identity(
        weights=text.weights,
        architecture=text.architecture,
        rope=_digest(sorted((key, str(value)) for key, value in text.rope.items())),
        arithmetic="/".join((*computed, *arithmetic, f"r{ARITHMETIC_REVISION}")),
        chunk_plan=str(chunk_tokens),
        key_format=kv_format,
        value_format=kv_format,
        rotation=str(ROTATION_VERSION) if packed is not None else "",
        codebook=kv_format if packed is not None else "",
        key_offsets=_offsets(packed),
        page_tokens=PAGE_TOKENS,
        grid_tokens=0 if grid is None else grid.tokens,
        layer_plan=_digest([layout.layers, shapes]),
        tokenizer=text.tokenizer,
        template=hashlib.sha256(text.template.encode()).hexdigest(),
        rules="",  # tokens of the first segment: in every key already
        drafter=text.drafter,
        mtp=text.mtp,
    )


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _offsets(packed: PackedPool | None) -> str:
    """Hash what is taken off keys; empty for nothing."""
    if packed is None or all(offsets is None for offsets in packed.offsets):
        return ""
    digest = hashlib.sha256()
    for offsets in packed.offsets:
        digest.update(b"-" if offsets is None else offsets.float().cpu().numpy().tobytes())
    return digest.hexdigest()
