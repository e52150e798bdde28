"""GGUF architecture `gemma3`, text (Gemma Team 2025, arXiv:2503.19786).

Five layers that see a window of the newest tokens, then one that sees all, with other rotary
frequencies, and so on; norms before and after each part.
"""

from dataclasses import dataclass
from typing import Self

import torch

from ragflash.errors import ModelError
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVLayout, LayerKV
from ragflash.models.contract import SequenceShape
from ragflash.models.decoder import Decoder, DecoderParts, inverse_frequencies, read_tables
from ragflash.models.layers import Attention, Mixer, Norm, PagedKV, SandwichBlock, gelu_tanh
from ragflash.models.metadata import Metadata
from ragflash.models.weights import WeightForm, WeightReader

GLOBAL, LOCAL = 0, 1  # sets of rotary frequencies
_LAYERS_OF_27B = 62


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    """Sizes and constants of a file; `is_local` has one entry a layer."""

    context_tokens: int
    is_local: tuple[bool, ...]
    window: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    theta_global: float
    theta_local: float
    positions_factor: float
    norm_eps: float
    soft_cap: float | None

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Self:
        """Read the metadata.

        Raises:
            GGUFInvalid: A key is absent, of the wrong type, or contradicts another.
            ModelError: The file wants something of its architecture that is not implemented.
        """
        if metadata.has("attn_logit_softcapping"):
            raise ModelError("soft caps of attention scores are not implemented")
        num_layers, hidden_size = metadata.num_layers(), metadata.size("embedding_length")
        num_heads, num_kv_heads, head_dim = metadata.heads(hidden_size)
        metadata.require_rotated(head_dim)
        # The 27B divides its queries by the width that a head would have if all had equal shares.
        scaled_dim = hidden_size // num_heads if num_layers == _LAYERS_OF_27B else head_dim
        period = metadata.size("attention.sliding_window_pattern", 6)
        return cls(
            context_tokens=metadata.size("context_length"),
            is_local=tuple((layer + 1) % period != 0 for layer in range(num_layers)),
            window=metadata.size("attention.sliding_window"),
            hidden_size=hidden_size,
            ffn_size=metadata.size("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            attention_scale=scaled_dim**-0.5,
            theta_global=metadata.number("rope.freq_base", 1_000_000.0),
            theta_local=metadata.number("rope.freq_base_swa", 10_000.0),
            positions_factor=_positions_factor(metadata),
            norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
            soft_cap=read_soft_cap(metadata),
        )


def _positions_factor(metadata: Metadata) -> float:
    """What positions are divided by in layers that see all."""
    scaling = metadata.file.get(metadata.key("rope.scaling.type"), str)
    if scaling in {None, "none"}:
        return 1.0
    if scaling == "linear":
        return metadata.number("rope.scaling.factor")
    raise ModelError(f"RoPE scaling {scaling!r} is not implemented for gemma3 files, only linear")


def read_soft_cap(metadata: Metadata) -> float | None:
    """Return the cap of the logits, if the file has one."""
    key = "final_logit_softcapping"
    return metadata.number(key) if metadata.has(key) else None


class Gemma3(Decoder):
    """A gemma3 file."""

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
        config = Gemma3Config.from_metadata(metadata)
        reader = WeightReader(file, dtype=dtype, device=device, form=form)
        embedding, head = read_tables(reader, metadata, config.hidden_size)
        frequencies = (
            inverse_frequencies(config.theta_global, config.head_dim) / config.positions_factor,
            inverse_frequencies(config.theta_local, config.head_dim),
        )
        num_layers = len(config.is_local)
        parts = DecoderParts(
            embedding=embedding,
            blocks=tuple(_read_block(reader, config, i) for i in range(num_layers)),
            norm=reader.norm("output_norm.weight", config.hidden_size, config.norm_eps),
            head=head,
            frequencies=tuple(f.to(device) for f in frequencies),
            embedding_scale=config.hidden_size**0.5,
            soft_cap=config.soft_cap,
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
        config = Gemma3Config.from_metadata(Metadata(file))
        layer = LayerKV(config.num_kv_heads, config.head_dim)
        return SequenceShape(config.context_tokens, (layer,) * len(config.is_local))


def _read_block(reader: WeightReader, config: Gemma3Config, index: int) -> SandwichBlock:
    prefix = f"blk.{index}."
    return read_sandwich(
        reader,
        prefix,
        mixer=_read_attention(reader, config, index),
        hidden_size=config.hidden_size,
        ffn_size=config.ffn_size,
        eps=config.norm_eps,
    )


def read_sandwich(
    reader: WeightReader,
    prefix: str,
    *,
    mixer: Mixer,
    hidden_size: int,
    ffn_size: int,
    eps: float,
    scale: float = 1.0,
) -> SandwichBlock:
    """Read the norms and the feed-forward part around a mixer, as all Gemma files name them."""

    def norm(name: str) -> Norm:
        return reader.norm(f"{prefix}{name}.weight", hidden_size, eps)

    return SandwichBlock(
        mixer_norm=norm("attn_norm"),
        mixer=mixer,
        mixer_post_norm=norm("post_attention_norm"),
        ffn_norm=norm("ffn_norm"),
        ffn=reader.gated_ffn(
            prefix, hidden_size=hidden_size, ffn_size=ffn_size, activation=gelu_tanh
        ),
        ffn_post_norm=norm("post_ffw_norm"),
        scale=scale,
    )


def _read_attention(reader: WeightReader, config: Gemma3Config, index: int) -> Attention:
    prefix, head_dim = f"blk.{index}.", config.head_dim
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    is_local = config.is_local[index]
    return Attention(
        qkv=reader.linear(
            [f"{prefix}attn_{name}.weight" for name in "qkv"],
            in_features=config.hidden_size,
            out_features=[num * head_dim for num in heads],
        ),
        output=reader.linear(
            [f"{prefix}attn_output.weight"],
            in_features=config.num_heads * head_dim,
            out_features=[config.hidden_size],
        ),
        kv=PagedKV(index, config.attention_scale, config.window if is_local else None),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
        rotary=LOCAL if is_local else GLOBAL,
        q_norm=reader.norm(f"{prefix}attn_q_norm.weight", head_dim, config.norm_eps),
        k_norm=reader.norm(f"{prefix}attn_k_norm.weight", head_dim, config.norm_eps),
    )
