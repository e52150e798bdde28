"""GGUF architecture `llama`: Llama 1 to 3, SmolLM2, and what else shares their blocks.

Pre-norm blocks of grouped-query attention and SwiGLU, rotary positions, no biases (Touvron et al.
2023, arXiv:2302.13971 and arXiv:2307.09288).
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch.nn import functional

from ragflash.errors import GGUFInvalid, ModelError
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVLayout, PagePool
from ragflash.models.contract import ForwardBatch, Model
from ragflash.models.weights import WeightReader
from ragflash_kernels.paged_attention import paged_attention
from ragflash_kernels.rms_norm import rms_norm
from ragflash_kernels.rope import rope


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of a file; `vocab_size` is that of its embedding table."""

    vocab_size: int
    context_tokens: int
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """Read the metadata.

        Raises:
            GGUFInvalid: A key is absent, of the wrong type, or contradicts another.
            ModelError: The file wants something of its architecture that is not implemented.
        """

        def size(key: str, default: int | None = None) -> int:
            value = file.get(f"llama.{key}", int)
            if value is None:
                value = file.require(f"llama.{key}", int) if default is None else default
            if value < 1:
                raise GGUFInvalid(f"llama.{key}", 0, f"{value} is not positive")
            return value

        _refuse_unimplemented(file)
        num_heads, hidden_size = size("attention.head_count"), size("embedding_length")
        num_kv_heads = size("attention.head_count_kv", num_heads)
        head_dim = size("attention.key_length", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise GGUFInvalid(
                "llama.attention.head_count_kv", 0, f"{num_kv_heads} does not divide {num_heads}"
            )
        for key in ("attention.value_length", "rope.dimension_count"):
            if size(key, head_dim) != head_dim or head_dim % 2:
                raise ModelError(
                    f"llama.{key} = {size(key, head_dim)} with heads of {head_dim} is not "
                    "implemented; they must be equal and even"
                )
        embedding = file.tensors.get("token_embd.weight")
        return cls(
            vocab_size=embedding.shape[0] if embedding else 0,
            context_tokens=size("context_length"),
            num_layers=size("block_count"),
            hidden_size=hidden_size,
            ffn_size=size("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=file.get("llama.rope.freq_base", float) or 10_000.0,
            norm_eps=file.require("llama.attention.layer_norm_rms_epsilon", float),
        )


def _refuse_unimplemented(file: GGUFFile) -> None:
    scaling = file.get("llama.rope.scaling.type", str)
    if scaling not in {None, "none"}:
        raise ModelError(f"RoPE scaling {scaling!r} is not implemented for llama files")
    if file.get("llama.rope.scale_linear", float) not in {None, 1.0}:
        raise ModelError("linear RoPE scaling is not implemented for llama files")
    if file.get("llama.expert_count", int):
        raise ModelError("llama files with experts (mixtures) are not implemented")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of a block; matrices are `[in, out]`."""

    attention_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [H, (Hq + 2 Hkv) D]
    output: torch.Tensor  # [Hq D, H]
    ffn_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [H, 2 F]
    down: torch.Tensor  # [F, H]


class Llama(Model):
    """A llama file's weights, unpacked; sequences have no state beside their pages."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        layers: tuple[_Layer, ...],
        embedding: torch.Tensor,
        head: torch.Tensor,
        norm: torch.Tensor,
        inverse_frequencies: torch.Tensor,
    ) -> None:
        self.config = config
        self._layers = layers
        self._embedding = embedding  # [H, V]; the same tensor as the head where they are tied
        self._head = head  # [H, V]
        self._norm = norm  # [H]
        self._inverse_frequencies = inverse_frequencies  # [D / 2]

    @classmethod
    def from_gguf(cls, file: GGUFFile, *, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Unpack every weight to `dtype`; raises a `ModelError` for a file it cannot run."""
        config = LlamaConfig.from_gguf(file)
        reader = WeightReader(file, dtype=dtype, device=device)

        def table(name: str) -> torch.Tensor:
            return reader.matrix(
                [name], in_features=config.hidden_size, out_features=[config.vocab_size]
            )

        embedding = table("token_embd.weight")
        model = cls(
            config,
            layers=tuple(_read_layer(reader, config, i) for i in range(config.num_layers)),
            embedding=embedding,
            head=table("output.weight") if reader.has("output.weight") else embedding,
            norm=reader.vector("output_norm.weight", config.hidden_size),
            inverse_frequencies=_inverse_frequencies(reader, config).to(device),
        )
        reader.require_all_used()
        return model

    @property
    def vocab_size(self) -> int:
        """See `Model`."""
        return self.config.vocab_size

    @property
    def context_tokens(self) -> int:
        """See `Model`."""
        return self.config.context_tokens

    @property
    def compute_dtype(self) -> torch.dtype:
        """See `Model`."""
        return self._embedding.dtype

    @property
    def is_recurrent(self) -> bool:
        """See `Model`."""
        return False

    @property
    def kv_layout(self) -> KVLayout:
        """See `Model`."""
        config = self.config
        return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, self.compute_dtype)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, pages: PagePool) -> torch.Tensor:
        """See `Model`."""
        x = self._embedding[:, batch.token_ids].t().contiguous()  # [N, H]
        angles = batch.positions[:, None].float() * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        for index, layer in enumerate(self._layers):
            h = rms_norm(x, layer.attention_norm, eps=self.config.norm_eps)
            x = x + self._attend(h @ layer.qkv, index, batch, pages, cos, sin) @ layer.output
            h = rms_norm(x, layer.ffn_norm, eps=self.config.norm_eps)
            gate, up = (h @ layer.gate_up).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ layer.down
        wanted = x[_logit_rows(batch)]
        return (rms_norm(wanted, self._norm, eps=self.config.norm_eps) @ self._head).float()

    def commit(self, slot: int, num_rows: int) -> None:
        """Nothing: all state is in pages."""

    def reset(self, slot: int) -> None:
        """Nothing: all state is in pages."""

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """Return nothing: all state is in pages."""
        return ()

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        """Nothing: all state is in pages."""

    def _attend(
        self,
        qkv: torch.Tensor,
        layer: int,
        batch: ForwardBatch,
        pages: PagePool,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Store K and V of every row, then return the heads' mixtures `[N, Hq D]`."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated, v = rope(heads[:, :num_rotated], cos, sin), heads[:, num_rotated:]
        q, k = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        start = 0
        for rows in batch.sequences:
            end = start + rows.num_rows
            pages.write(layer, rows.pages, rows.committed, k[start:end], v[start:end])
            start = end
        mixed = paged_attention(
            q,
            pages.keys(layer),
            pages.values(layer),
            sequences=batch.sequences,
            scale=config.head_dim**-0.5,
        )
        return mixed.reshape(len(qkv), -1)


def _logit_rows(batch: ForwardBatch) -> torch.Tensor:
    """Rows of the batch whose logits are wanted."""
    wanted: list[int] = []
    start = 0
    for rows in batch.sequences:
        wanted += [start + row for row in rows.logit_rows]
        start += rows.num_rows
    return torch.tensor(wanted, dtype=torch.int64, device=batch.token_ids.device)


def _read_layer(reader: WeightReader, config: LlamaConfig, index: int) -> _Layer:
    prefix = f"blk.{index}."
    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return _Layer(
        attention_norm=reader.vector(f"{prefix}attn_norm.weight", hidden),
        qkv=reader.matrix(
            [f"{prefix}attn_{name}.weight" for name in "qkv"],
            in_features=hidden,
            out_features=[q_size, kv_size, kv_size],
            row_orders=[
                _halves_order(config.num_heads, config.head_dim),
                _halves_order(config.num_kv_heads, config.head_dim),
                None,
            ],
        ),
        output=reader.matrix(
            [f"{prefix}attn_output.weight"], in_features=q_size, out_features=[hidden]
        ),
        ffn_norm=reader.vector(f"{prefix}ffn_norm.weight", hidden),
        gate_up=reader.matrix(
            [f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight"],
            in_features=hidden,
            out_features=[ffn, ffn],
        ),
        down=reader.matrix([f"{prefix}ffn_down.weight"], in_features=ffn, out_features=[hidden]),
    )


def _halves_order(num_heads: int, head_dim: int) -> torch.Tensor:
    """Where rows of Q and K come from: GGUF llama files pair dimensions 2j and 2j + 1."""
    rows = torch.arange(num_heads * head_dim).view(num_heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


def _inverse_frequencies(reader: WeightReader, config: LlamaConfig) -> torch.Tensor:
    """Angle per position of each pair `[D / 2]`; Llama 3.1 files divide them by a tensor."""
    exponents = torch.arange(0, config.head_dim, 2).double() / config.head_dim
    frequencies = (config.rope_theta**-exponents).float()
    if reader.has("rope_freqs.weight"):
        divisors = reader.vector("rope_freqs.weight", config.head_dim // 2)
        frequencies = frequencies / divisors.to(frequencies.device)
    return frequencies
