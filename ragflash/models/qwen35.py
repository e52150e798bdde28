"""GGUF architecture `qwen35`: Qwen3.5, 3.6 and 3.8, dense.

Three layers of Gated DeltaNet (arXiv:2412.06464), then one of attention whose output is gated
(Qiu et al. 2025, arXiv:2505.06708), and so on; SwiGLU after each. Text positions are the same in
all sections of its multimodal rotary embedding, so that it is the plain one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from ragflash.errors import GGUFInvalid, ModelError
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVLayout, LayerKV
from ragflash.models.contract import SequenceShape
from ragflash.models.decoder import DecoderParts, inverse_frequencies, read_tables
from ragflash.models.deltanet import DeltaNetSizes, GatedDeltaNet
from ragflash.models.hybrid import HybridDecoder
from ragflash.models.layers import Block, Mixer, Norm, PagedKV, Step
from ragflash.models.linear import Embedding, Linear, PackedEmbedding
from ragflash.models.metadata import Metadata
from ragflash.models.mtp import MtpHead
from ragflash.models.recurrent import SlotStates
from ragflash.models.weights import WeightForm, WeightReader
from ragflash_kernels.rope import rope


@dataclass(frozen=True, slots=True)
class Qwen35Config:
    """Sizes and constants of a file; `has_attention` has one entry a layer."""

    context_tokens: int
    has_attention: tuple[bool, ...]
    has_mtp: bool
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated_dim: int
    rope_theta: float
    norm_eps: float
    deltanet: DeltaNetSizes

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
        rotated_dim = metadata.size("rope.dimension_count", head_dim)
        if rotated_dim % 2 or rotated_dim > head_dim:
            raise GGUFInvalid(
                metadata.key("rope.dimension_count"), 0, f"{rotated_dim} of {head_dim} dimensions"
            )
        num_mtp = metadata.count("nextn_predict_layers")
        if num_mtp > 1:
            raise ModelError(f"{num_mtp} blocks of multi-token prediction are not implemented")
        return cls(
            context_tokens=metadata.size("context_length"),
            has_attention=_attention_layers(metadata, metadata.num_layers() - num_mtp),
            has_mtp=num_mtp == 1,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotated_dim=rotated_dim,
            rope_theta=metadata.number("rope.freq_base", 10_000_000.0),
            norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
            deltanet=_deltanet_sizes(metadata),
        )

    @property
    def num_recurrent(self) -> int:
        """Layers with state."""
        return len(self.has_attention) - sum(self.has_attention)

    @property
    def num_kv_layers(self) -> int:
        """Layers with keys and values, that of multi-token prediction last."""
        return sum(self.has_attention) + self.has_mtp


def _attention_layers(metadata: Metadata, num_layers: int) -> tuple[bool, ...]:
    recurrent = metadata.flags("attention.recurrent_layers", num_layers)
    if recurrent is not None:
        return tuple(not flag for flag in recurrent)
    interval = metadata.size("full_attention_interval", 4)
    return tuple((layer + 1) % interval == 0 for layer in range(num_layers))


def _deltanet_sizes(metadata: Metadata) -> DeltaNetSizes:
    num_key_heads = metadata.size("ssm.group_count")
    num_value_heads = metadata.size("ssm.time_step_rank")
    inner_size = metadata.size("ssm.inner_size")
    for key, whole, part in (
        ("ssm.time_step_rank", num_value_heads, num_key_heads),
        ("ssm.inner_size", inner_size, num_value_heads),
    ):
        if whole % part:
            raise GGUFInvalid(metadata.key(key), 0, f"{whole} is no multiple of {part}")
    return DeltaNetSizes(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=metadata.size("ssm.state_size"),
        value_dim=inner_size // num_value_heads,
        conv_width=metadata.size("ssm.conv_kernel"),
    )


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Attention on the first dimensions' rotation, its output gated value by value.

    Attributes:
        projections: Gives Q, the gates of its values, K and V side by side.
        output: Of the gated heads.
        kv: Its pages.
        num_heads: Query heads.
        num_kv_heads: Heads of K, and of V.
        head_dim: Values a head.
        q_norm: Of each query head before rotation.
        k_norm: Of each key head before rotation.
    """

    projections: Linear
    output: Linear
    kv: PagedKV
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm
    k_norm: Norm

    def __call__(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """Mix the rows of every sequence; see `Mixer`."""
        heads = self.projections(h).view(len(h), -1, self.head_dim)
        queries, keys = self.num_heads, self.num_kv_heads
        q, gate, k, v = heads.split_with_sizes((queries, queries, keys, keys), dim=1)
        rotated = rope(torch.cat((self.q_norm(q), self.k_norm(k)), dim=1), *step.angles[0])
        mixed = self.kv.attend(rotated[:, :queries], rotated[:, queries:], v, step)
        return self.output(mixed * gate.flatten(1).sigmoid())


class Qwen35(HybridDecoder):
    """A qwen35 file."""

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
        config = Qwen35Config.from_metadata(metadata)
        reader = WeightReader(file, dtype=dtype, device=device, form=form)
        embedding, head = read_tables(reader, metadata, config.hidden_size)
        ffn = cls._ffn_reader(metadata, reader, config.hidden_size)
        frequencies = inverse_frequencies(config.rope_theta, config.rotated_dim)
        parts = DecoderParts(
            embedding=embedding,
            blocks=tuple(_read_blocks(reader, config, ffn)),
            norm=reader.norm("output_norm.weight", config.hidden_size, config.norm_eps),
            head=head,
            frequencies=(frequencies.to(device),),
        )
        model = cls(
            parts,
            vocab_size=metadata.vocab_size(),
            context_tokens=config.context_tokens,
            kv_layout=KVLayout(cls.shape(file).kv_layers, dtype),
            states=SlotStates(config.num_recurrent, config.deltanet.state_shape, device=device),
        )
        if config.has_mtp:
            model.mtp = _read_mtp(reader, config, ffn, embedding, head)
        reader.require_all_used()
        return model

    @classmethod
    def shape(cls, file: GGUFFile) -> SequenceShape:
        """Say what the file's model keeps of a sequence."""
        config = Qwen35Config.from_metadata(Metadata(file))
        layer = LayerKV(config.num_kv_heads, config.head_dim)
        sizes = config.deltanet
        # A row's inputs of the convolution, its keys, corrections and decays, all float32.
        tape_values = sizes.conv_channels + sizes.num_key_heads * sizes.key_dim
        tape_values += sizes.values_size + sizes.num_value_heads
        return SequenceShape(
            config.context_tokens,
            (layer,) * config.num_kv_layers,
            state_bytes=4 * config.num_recurrent * sizes.state_shape.num_values,
            tape_bytes=4 * config.num_recurrent * tape_values,
        )

    @classmethod
    def _ffn_reader(cls, metadata: Metadata, reader: WeightReader, hidden_size: int) -> "FFNReader":
        metadata.refuse("expert_count", "experts (mixtures)")
        ffn_size = metadata.size("feed_forward_length")

        def read(prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
            return reader.gated_ffn(prefix, hidden_size=hidden_size, ffn_size=ffn_size)

        return read


FFNReader = Callable[[str], Callable[[torch.Tensor], torch.Tensor]]  # from a block's prefix


def _read_blocks(reader: WeightReader, config: Qwen35Config, ffn: FFNReader) -> list[Block]:
    blocks: list[Block] = []
    num_kv = num_recurrent = 0
    for index, has_attention in enumerate(config.has_attention):
        prefix = f"blk.{index}."
        mixer: Mixer
        if has_attention:
            mixer = _read_attention(reader, config, prefix, kv_layer=num_kv)
            num_kv += 1
        else:
            mixer = _read_deltanet(reader, config, prefix, state_layer=num_recurrent)
            num_recurrent += 1
        blocks.append(_read_block(reader, config, prefix, mixer, ffn))
    return blocks


def _read_block(
    reader: WeightReader, config: Qwen35Config, prefix: str, mixer: Mixer, ffn: FFNReader
) -> Block:
    hidden, eps = config.hidden_size, config.norm_eps
    return Block(
        mixer_norm=reader.norm(f"{prefix}attn_norm.weight", hidden, eps),
        mixer=mixer,
        ffn_norm=reader.norm(f"{prefix}post_attention_norm.weight", hidden, eps),
        ffn=ffn(prefix),
    )


def _read_attention(
    reader: WeightReader, config: Qwen35Config, prefix: str, *, kv_layer: int
) -> GatedAttention:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # The file has a head's gates after its queries; here all gates follow all queries.
    rows = torch.arange(2 * queries).view(config.num_heads, 2, config.head_dim)
    return GatedAttention(
        projections=reader.linear(
            [f"{prefix}attn_{name}.weight" for name in "qkv"],
            in_features=config.hidden_size,
            out_features=[2 * queries, keys, keys],
            row_orders=[rows.transpose(0, 1).reshape(-1), None, None],
        ),
        output=reader.linear(
            [f"{prefix}attn_output.weight"], in_features=queries, out_features=[config.hidden_size]
        ),
        kv=PagedKV(kv_layer, config.head_dim**-0.5),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        q_norm=reader.norm(f"{prefix}attn_q_norm.weight", config.head_dim, config.norm_eps),
        k_norm=reader.norm(f"{prefix}attn_k_norm.weight", config.head_dim, config.norm_eps),
    )


def _read_deltanet(
    reader: WeightReader, config: Qwen35Config, prefix: str, *, state_layer: int
) -> GatedDeltaNet:
    sizes = config.deltanet
    heads = sizes.num_value_heads
    return GatedDeltaNet(
        sizes=sizes,
        layer=state_layer,
        projections=reader.linear(
            [
                f"{prefix}{name}.weight"
                for name in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
            ],
            in_features=config.hidden_size,
            out_features=[sizes.conv_channels, sizes.values_size, heads, heads],
        ),
        conv=reader.tensor(f"{prefix}ssm_conv1d.weight", (sizes.conv_channels, sizes.conv_width)),
        decay_rate=reader.vector(f"{prefix}ssm_a", heads),
        decay_bias=reader.vector(f"{prefix}ssm_dt.bias", heads),
        norm=reader.norm(f"{prefix}ssm_norm.weight", sizes.value_dim, config.norm_eps),
        output=reader.linear(
            [f"{prefix}ssm_out.weight"],
            in_features=sizes.values_size,
            out_features=[config.hidden_size],
        ),
    )


def _read_mtp(
    reader: WeightReader,
    config: Qwen35Config,
    ffn: FFNReader,
    embedding: Embedding | PackedEmbedding,
    head: Linear,
) -> MtpHead:
    prefix = f"blk.{len(config.has_attention)}."
    hidden, eps = config.hidden_size, config.norm_eps
    attention = _read_attention(reader, config, prefix, kv_layer=config.num_kv_layers - 1)
    nextn = f"{prefix}nextn."
    vocab_size = reader.rows("token_embd.weight")
    if reader.has(f"{nextn}embed_tokens.weight"):
        embedding = reader.embedding(f"{nextn}embed_tokens.weight", vocab_size, hidden)
    if reader.has(f"{nextn}shared_head_head.weight"):
        head = reader.linear(
            [f"{nextn}shared_head_head.weight"], in_features=hidden, out_features=[vocab_size]
        )
    return MtpHead(
        embedding=embedding,
        embedding_norm=reader.norm(f"{nextn}enorm.weight", hidden, eps),
        hidden_norm=reader.norm(f"{nextn}hnorm.weight", hidden, eps),
        join=reader.linear(
            [f"{nextn}eh_proj.weight"], in_features=2 * hidden, out_features=[hidden]
        ),
        block=_read_block(reader, config, prefix, attention, ffn),
        norm=reader.norm(f"{nextn}shared_head_norm.weight", hidden, eps),
        head=head,
    )
