"""Tensors of a GGUF file as what a model multiplies with."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import torch

from ragflash.errors import ModelError, TensorMissing
from ragflash.gguf.reader import GGUFFile
from ragflash.models.device.matrices import RecordLinear, Stored
from ragflash.models.device.upload import Uploader
from ragflash.models.layers import Activation, GatedFFN, Norm, silu
from ragflash.models.linear import DenseLinear, Embedding, Linear, PackedEmbedding, SideBySide
from ragflash.models.moe import ExpertMatrices
from ragflash.models.packed import PackedLinear, can_pack
from ragflash_kernels.dequant import dequantize

WeightForm = Literal["dense", "packed", "records"]


class WeightReader:
    """Unpacks tensors by name, checks their shapes, and knows which it was asked for.

    Args:
        file: Where they are.
        dtype: Of matrices that are unpacked.
        device: Where tensors go.
        form: `dense` unpacks matrices; `packed` leaves those of 4-bit blocks as they are, for a
            CPU; `records` repacks them for the kernels of a card.
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        form: WeightForm = "dense",
    ) -> None:
        self._file = file
        self._form = form
        self._upload = Uploader(device)
        self._dtype = dtype
        self._device = device
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor."""
        return name in self._file.tensors

    def rows(self, name: str) -> int:
        """Return the rows of a matrix; raises `TensorMissing` when the file lacks it."""
        if not self.has(name):
            raise TensorMissing(f"{self._file.path.name} has no tensor {name!r}")
        return self._file.tensors[name].shape[0]

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Return float32 `[size]`; norms and the like are never rounded to the compute dtype."""
        return self._unpacked(name, (size,), torch.float32).view(size).to(self._device)

    def norm(self, name: str, size: int, eps: float) -> Norm:
        """Return a norm by the weights `[size]` of a tensor."""
        return Norm(self.vector(name, size), eps)

    def linear(
        self,
        names: Sequence[str],
        *,
        in_features: int,
        out_features: Sequence[int],
        row_orders: Sequence[torch.Tensor | None] | None = None,
        biases: Sequence[str] = (),
    ) -> Linear:
        """Return matrices side by side, so that one product does for all.

        Args:
            names: Tensors of `[out, in]` each.
            in_features: Of each of them.
            out_features: One for each name.
            row_orders: For each name where its output rows come from, `None` for as stored.
            biases: Tensors of `[out]`, one for each name or none; added in the order as stored.

        Raises:
            TensorMissing: A tensor is absent or has another shape.
            UnsupportedTensorType: A tensor is stored in a format that ragflash does not read.
        """
        orders = row_orders or [None] * len(names)
        bias = self._bias(biases, out_features) if biases else None
        stored = []
        for name, size, order in zip(names, out_features, orders, strict=True):
            blocks, block_format = self._stored(name, (size, in_features))
            stored.append((blocks if order is None else blocks[order], block_format))
        if self._form == "records":
            return self._records(stored, out_features, bias)
        packs = self._form == "packed"
        if packs and can_pack([kind for _, kind in stored], sum(out_features)):
            return PackedLinear(torch.cat([blocks for blocks, _ in stored]), stored[0][1], bias)
        if packs and any(can_pack([kind], len(blocks)) for blocks, kind in stored):
            biases_of = [None] * len(names) if bias is None else torch.split(bias, [*out_features])
            parts = zip(stored, biases_of, strict=True)
            return SideBySide([self._alone(*part, in_features, b) for part, b in parts])
        return self._dense(stored, in_features, bias)

    def _records(
        self,
        stored: Sequence[tuple[torch.Tensor, str]],
        widths: Sequence[int],
        bias: torch.Tensor | None,
    ) -> RecordLinear:
        """Neighbours of one format become one matrix, so that one launch does for all."""
        groups = []
        for block_format, group in groupby(stored, key=lambda one: one[1]):
            blocks = [self._upload(blocks) for blocks, _ in group]
            groups.append(Stored(torch.cat(blocks) if len(blocks) > 1 else blocks[0], block_format))
        return RecordLinear.of(groups, widths, bias)

    def _alone(
        self, blocks: torch.Tensor, block_format: str, in_features: int, bias: torch.Tensor | None
    ) -> Linear:
        if can_pack([block_format], len(blocks)):
            return PackedLinear(blocks, block_format, bias)
        return self._dense([(blocks, block_format)], in_features, bias)

    def _dense(
        self,
        stored: Sequence[tuple[torch.Tensor, str]],
        in_features: int,
        bias: torch.Tensor | None,
    ) -> Linear:
        sizes = [len(blocks) for blocks, _ in stored]
        fused = torch.empty(sum(sizes), in_features, dtype=self._dtype, device=self._device)
        for (blocks, block_format), target in zip(
            stored, fused.split_with_sizes(sizes), strict=True
        ):
            self._unpack_into(target, blocks, block_format)
        return DenseLinear(fused, bias)

    def gated_ffn(
        self,
        prefix: str,
        *,
        hidden_size: int,
        ffn_size: int,
        suffix: str = "",
        activation: Activation = silu,
    ) -> GatedFFN:
        """Return the part of tensors `ffn_gate`, `ffn_up`, `ffn_down` of a block's `prefix`."""
        gate, up, down = (f"{prefix}ffn_{part}{suffix}.weight" for part in ("gate", "up", "down"))
        return GatedFFN(
            self.linear([gate, up], in_features=hidden_size, out_features=[ffn_size, ffn_size]),
            self.linear([down], in_features=ffn_size, out_features=[hidden_size]),
            activation,
        )

    def embedding(
        self, name: str, vocab_size: int, hidden_size: int
    ) -> Embedding | PackedEmbedding:
        """Return a table of token vectors; a card's stays packed in the host's memory."""
        if self._form == "records":
            blocks, block_format = self._stored(name, (vocab_size, hidden_size))
            pinned = torch.device(self._device).type == "cuda"
            blocks = blocks.pin_memory() if pinned else blocks.clone()
            return PackedEmbedding(blocks, block_format, torch.float32)
        table = torch.empty(vocab_size, hidden_size, dtype=self._dtype, device=self._device)
        self._unpack_into(table, *self._stored(name, (vocab_size, hidden_size)))
        return Embedding(table)

    def packed_embedding(self, name: str, vocab_size: int, hidden_size: int) -> PackedEmbedding:
        """Return a table of token vectors that stays packed."""
        blocks, block_format = self._stored(name, (vocab_size, hidden_size))
        return PackedEmbedding(blocks.to(self._device), block_format, self._dtype)

    def tied_head(self, embedding: Embedding | PackedEmbedding) -> Linear:
        """Return the head that an embedding is too; unpacked they share their memory."""
        if isinstance(embedding, PackedEmbedding):
            blocks = self._upload(embedding.blocks)
            return RecordLinear.of([Stored(blocks, embedding.block_format)], [len(blocks)])
        return DenseLinear(embedding.weight)

    def experts(
        self, name: str, num_experts: int, in_features: int, out_features: int
    ) -> ExpertMatrices:
        """Return a tensor of one `[out, in]` matrix an expert, packed as it is stored."""
        blocks, block_format = self._stored(name, (num_experts, out_features, in_features))
        return ExpertMatrices(blocks.to(self._device), block_format, out_features, self._dtype)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of any shape as float32, as it is stored."""
        return self._unpacked(name, shape, torch.float32).view(shape).to(self._device)

    def require_all_used(self) -> None:
        """Raise `ModelError` when the file holds tensors that nobody asked for.

        They would be part of the computation that the file stands for.
        """
        unused = sorted(set(self._file.tensors) - self._used)
        if unused:
            raise ModelError(
                f"{self._file.path.name} holds {len(unused)} tensors that this architecture does "
                f"not use, among them {', '.join(unused[:3])}"
            )

    def _bias(self, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        parts = [self.vector(name, size) for name, size in zip(names, sizes, strict=True)]
        return torch.cat(parts).to(torch.float32 if self._form == "records" else self._dtype)

    def _unpack_into(self, target: torch.Tensor, blocks: torch.Tensor, block_format: str) -> None:
        """Write rows `[out, in]`, without holding them twice."""
        dequantize(
            blocks.to(self._device), block_format=block_format, dtype=self._dtype, out=target
        )

    def _unpacked(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        blocks, block_format = self._stored(name, shape)
        return dequantize(blocks, block_format=block_format, dtype=dtype)

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, str]:
        """Return a tensor's blocks `[rows, row bytes]` and their format, and count it as used."""
        blocks = torch.from_numpy(self._file.tensor_blocks(name))
        info = self._file.tensors[name]
        if info.shape != shape:
            raise TensorMissing(
                f"tensor {name!r} has shape {list(info.shape)}, the metadata says {list(shape)}"
            )
        self._used.add(name)
        return blocks, info.type.name


def weight_format(file: GGUFFile) -> str:
    """Return the block format that holds most of a file's values, such as `Q4_1`."""
    values: Counter[str] = Counter()
    for tensor in file.tensors.values():
        values[tensor.type.name] += torch.Size(tensor.shape).numel()
    return values.most_common(1)[0][0] if values else "none"
