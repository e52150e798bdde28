"""From a loaded decoder to its programme on a card: each layer becomes its fused form."""

from typing import Literal

from ragflash.errors import ModelError
from ragflash.models.decoder import Decoder
from ragflash.models.deltanet import GatedDeltaNet
from ragflash.models.device.matrices import RecordLinear
from ragflash.models.device.mtp import FusedMtp
from ragflash.models.device.programme import (
    FusedAttention,
    FusedBlock,
    FusedDeltaNet,
    FusedFFN,
    FusedMixer,
    Programme,
)
from ragflash.models.device.steps import DeltaWeights, HeadSizes
from ragflash.models.layers import (
    Activation,
    Attention,
    Block,
    GatedFFN,
    Norm,
    SandwichBlock,
    gelu_tanh,
    silu,
)
from ragflash.models.linear import Linear, PackedEmbedding
from ragflash.models.mtp import MtpHead
from ragflash.models.qwen35 import GatedAttention
from ragflash_kernels.gated_delta import DeltaSizes

_ACTIVATIONS: dict[Activation, Literal["silu", "gelu_tanh"]] = {
    silu: "silu",
    gelu_tanh: "gelu_tanh",
}


def lower(decoder: Decoder) -> Programme:
    """Return the programme of a decoder whose matrices are records.

    Raises:
        ModelError: It has a layer that no fused form exists of.
    """
    parts = decoder.parts
    if not isinstance(parts.embedding, PackedEmbedding):
        raise ModelError("the model was not loaded for a card")
    return Programme(
        embedding=parts.embedding,
        blocks=tuple(_block(block) for block in parts.blocks),
        norm=parts.norm,
        head=_records(parts.head),
        frequencies=parts.frequencies,
        embedding_scale=parts.embedding_scale,
        soft_cap=parts.soft_cap,
    )


def lower_mtp(head: MtpHead) -> FusedMtp:
    """Return the fused form of a block of multi-token prediction; see `lower`."""
    block = _block(head.block)
    if not isinstance(head.embedding, PackedEmbedding) or not isinstance(
        block.mixer, FusedAttention
    ):
        raise _unknown(head)
    return FusedMtp(
        embedding=head.embedding,
        embedding_norm=head.embedding_norm,
        hidden_norm=head.hidden_norm,
        join=_records(head.join),
        block=block,
        mixer=block.mixer,
        norm=head.norm,
        head=_records(head.head),
        reads_normed=head.reads_normed,
    )


def _block(block: object) -> FusedBlock:
    match block:
        case Block():
            return FusedBlock(
                block.mixer_norm, _mixer(block.mixer), None, block.ffn_norm, _ffn(block.ffn), None,
                1.0,
            )  # fmt: skip
        case SandwichBlock():
            return FusedBlock(
                block.mixer_norm, _mixer(block.mixer), block.mixer_post_norm, block.ffn_norm,
                _ffn(block.ffn), block.ffn_post_norm, block.scale,
            )  # fmt: skip
    raise _unknown(block)


def _mixer(mixer: object) -> FusedMixer:
    match mixer:
        case Attention():
            return FusedAttention(
                mixer.num_heads, mixer.num_kv_heads, _records(mixer.qkv), _records(mixer.output),
                mixer.kv,
                _sizes(mixer.head_dim, mixer.q_norm, mixer.k_norm), mixer.rotary, is_gated=False,
            )  # fmt: skip
        case GatedAttention():
            return FusedAttention(
                mixer.num_heads, mixer.num_kv_heads, _records(mixer.projections),
                _records(mixer.output), mixer.kv,
                _sizes(mixer.head_dim, mixer.q_norm, mixer.k_norm), 0, is_gated=True,
            )  # fmt: skip
        case GatedDeltaNet():
            weights = DeltaWeights(mixer.conv, mixer.decay_rate, mixer.decay_bias)
            of = mixer.sizes
            sizes = DeltaSizes(
                of.num_key_heads, of.num_value_heads, of.key_dim, of.value_dim, of.conv_width
            )
            return FusedDeltaNet(
                mixer.layer, sizes, _records(mixer.projections), weights, mixer.norm,
                _records(mixer.output),
            )  # fmt: skip
    raise _unknown(mixer)


def _ffn(ffn: object) -> FusedFFN:
    if isinstance(ffn, GatedFFN) and ffn.activation in _ACTIVATIONS:
        return FusedFFN(_records(ffn.gate_up), _records(ffn.down), _ACTIVATIONS[ffn.activation])
    raise _unknown(ffn)


def _sizes(head_dim: int, q_norm: Norm | None, k_norm: Norm | None) -> HeadSizes:
    if q_norm is None or k_norm is None:
        return HeadSizes(head_dim, None, None, 1.0)
    return HeadSizes(head_dim, q_norm.weight, k_norm.weight, q_norm.eps)


def _records(linear: Linear) -> RecordLinear:
    if isinstance(linear, RecordLinear):
        return linear
    raise _unknown(linear)


def _unknown(layer: object) -> ModelError:
    kind = type(layer).__name__
    return ModelError(f"a card does not run {kind} layers yet; choose --device cpu")
