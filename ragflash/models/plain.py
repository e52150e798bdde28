"""Pre-norm decoders of grouped-query attention and SwiGLU, the same in every layer.

Llama (Touvron et al. 2023, arXiv:2307.09288) and the dense Qwen models up to the third differ in
three points, which are class variables here.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVLayout, LayerKV
from ragflash.models.contract import SequenceShape
from ragflash.models.decoder import Decoder, DecoderParts, inverse_frequencies, read_tables
from ragflash.models.layers import Attention, Block, Norm, PagedKV
from ragflash.models.linear import Linear
from ragflash.models.metadata import Metadata
from ragflash.models.weights import WeightForm, WeightReader


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """Sizes and constants of a file."""

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
    def from_metadata(cls, metadata: Metadata) -> Self:
        """Read the metadata.

        Raises:
            GGUFInvalid: A key is absent, of the wrong type, or contradicts another.
            ModelError: The file wants something of its architecture that is not implemented.
        """
        metadata.refuse_rope_scaling()
        hidden_size = metadata.size("embedding_length")
        num_heads, num_kv_heads, head_dim = metadata.heads(hidden_size)
        metadata.require_rotated(head_dim)
        return cls(
            context_tokens=metadata.size("context_length"),
            num_layers=metadata.num_layers(),
            hidden_size=hidden_size,
            ffn_size=metadata.size("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=metadata.number("rope.freq_base", 10_000.0),
            norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        )


class PlainDecoder(Decoder):
    """A file of such an architecture.

    Attributes:
        pairs_neighbours: Whether the file pairs dimensions 2j and 2j + 1 for rotation, not halves.
        has_qkv_bias: Whether Q, K and V have biases.
        has_head_norms: Whether each head of Q and K is normalised before rotation.
    """

    pairs_neighbours: ClassVar[bool] = False
    has_qkv_bias: ClassVar[bool] = False
    has_head_norms: ClassVar[bool] = False

    @classmethod
    def from_gguf(
        cls,
        file: GGUFFile,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        form: WeightForm = "dense",
    ) -> Self:
        """Load every weight; raises a `ModelError` for a file it cannot run."""
        metadata = Metadata(file)
        metadata.refuse("expert_count", "experts (mixtures)")
        config = PlainConfig.from_metadata(metadata)
        reader = WeightReader(file, dtype=dtype, device=device, form=form)
        embedding, head = read_tables(reader, metadata, config.hidden_size)
        parts = DecoderParts(
            embedding=embedding,
            blocks=tuple(cls._read_block(reader, config, i) for i in range(config.num_layers)),
            norm=reader.norm("output_norm.weight", config.hidden_size, config.norm_eps),
            head=head,
            frequencies=(_frequencies(reader, config).to(device),),
        )
        reader.require_all_used()
        return cls(
            parts,
            vocab_size=metadata.vocab_size(),
            context_tokens=config.context_tokens,
            kv_layout=KVLayout(cls.shape(file).kv_layers, dtype),
        )

    @classmethod
    def shape(cls, file: GGUFFile) -> SequenceShape:
        """Say what the file's model keeps of a sequence."""
        config = PlainConfig.from_metadata(Metadata(file))
        layer = LayerKV(config.num_kv_heads, config.head_dim)
        return SequenceShape(config.context_tokens, (layer,) * config.num_layers)

    @classmethod
    def _read_block(cls, reader: WeightReader, config: PlainConfig, index: int) -> Block:
        prefix = f"blk.{index}."
        hidden, eps = config.hidden_size, config.norm_eps
        return Block(
            mixer_norm=reader.norm(f"{prefix}attn_norm.weight", hidden, eps),
            mixer=cls._read_attention(reader, config, index),
            ffn_norm=reader.norm(f"{prefix}ffn_norm.weight", hidden, eps),
            ffn=reader.gated_ffn(prefix, hidden_size=hidden, ffn_size=config.ffn_size),
        )

    @classmethod
    def _read_attention(cls, reader: WeightReader, config: PlainConfig, index: int) -> Attention:
        prefix, head_dim = f"blk.{index}.", config.head_dim

        def head_norm(name: str) -> Norm | None:
            if not cls.has_head_norms:
                return None
            return reader.norm(f"{prefix}attn_{name}_norm.weight", head_dim, config.norm_eps)

        return Attention(
            qkv=cls._read_qkv(reader, config, prefix),
            output=reader.linear(
                [f"{prefix}attn_output.weight"],
                in_features=config.num_heads * head_dim,
                out_features=[config.hidden_size],
            ),
            kv=PagedKV(index, head_dim**-0.5),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=head_dim,
            q_norm=head_norm("q"),
            k_norm=head_norm("k"),
        )

    @classmethod
    def _read_qkv(cls, reader: WeightReader, config: PlainConfig, prefix: str) -> Linear:
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        orders: list[torch.Tensor | None] = [None, None, None]
        if cls.pairs_neighbours:
            orders[:2] = [_halves_order(num, config.head_dim) for num in heads[:2]]
        return reader.linear(
            [f"{prefix}attn_{name}.weight" for name in "qkv"],
            in_features=config.hidden_size,
            out_features=[num * config.head_dim for num in heads],
            row_orders=orders,
            biases=[f"{prefix}attn_{name}.bias" for name in "qkv"] if cls.has_qkv_bias else (),
        )


def _frequencies(reader: WeightReader, config: PlainConfig) -> torch.Tensor:
    """Angle a position of each pair `[D / 2]`; Llama 3.1 files divide them by a tensor."""
    frequencies = inverse_frequencies(config.rope_theta, config.head_dim)
    if reader.has("rope_freqs.weight"):
        divisors = reader.vector("rope_freqs.weight", config.head_dim // 2)
        frequencies = frequencies / divisors.to(frequencies.device)
    return frequencies


def _halves_order(num_heads: int, head_dim: int) -> torch.Tensor:
    """Where rows of Q and K come from so that dimension j pairs with j + D / 2."""
    rows = torch.arange(num_heads * head_dim).view(num_heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)
