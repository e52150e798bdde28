"""GGUF architecture `gemma4`, text, dense.

As Gemma 3, but layers that see all have larger and fewer key heads, of which only the first pairs
rotate and which may give the values too; scores are not scaled, values are normalised, and each
layer has a factor. In the smallest models (E2B, E4B) later layers read the keys and values of an
earlier one, and each layer is given vectors of the tokens of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import sqrt
from typing import Self

import torch

from ragflash.errors import GGUFInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVLayout, LayerKV
from ragflash.models.contract import SequenceShape
from ragflash.models.decoder import Decoder, DecoderParts, inverse_frequencies, read_tables
from ragflash.models.gemma3 import GLOBAL, LOCAL, read_sandwich, read_soft_cap
from ragflash.models.layers import Mixer, Norm, PagedKV, Step, gelu_tanh
from ragflash.models.linear import Linear, PackedEmbedding
from ragflash.models.metadata import Metadata
from ragflash.models.weights import WeightForm, WeightReader
from ragflash_kernels.rope import rope


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """Sizes of one layer.

    Attributes:
        is_local: Whether it sees a window only.
        num_kv_heads: Heads of K, and of V.
        head_dim: Values a head.
        ffn_size: Of its feed-forward part.
        kv_layer: Where its keys and values are in the pages.
        owns_kv: Whether it writes them; the others read an earlier layer's.
    """

    is_local: bool
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    kv_layer: int
    owns_kv: bool


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """Sizes and constants of a file."""

    context_tokens: int
    layers: tuple[Gemma4Layer, ...]
    window: int
    hidden_size: int
    layer_input_size: int
    num_heads: int
    theta_global: float
    theta_local: float
    norm_eps: float
    soft_cap: float | None

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Self:
        """Read the metadata.

        Raises:
            GGUFInvalid: A key is absent, of the wrong type, or contradicts another.
            ModelError: The file wants something of its architecture that is not implemented.
        """
        metadata.refuse("expert_count", "experts (26B-A4B)")
        metadata.refuse_rope_scaling()
        layers = tuple(_layers(metadata, metadata.num_layers()))
        num_heads = metadata.size("attention.head_count")
        metadata.require_shared(num_heads, (layer.num_kv_heads for layer in layers))
        return cls(
            context_tokens=metadata.size("context_length"),
            layers=layers,
            window=metadata.size("attention.sliding_window"),
            hidden_size=metadata.size("embedding_length"),
            layer_input_size=metadata.count("embedding_length_per_layer_input"),
            num_heads=num_heads,
            theta_global=metadata.number("rope.freq_base", 1_000_000.0),
            theta_local=metadata.number("rope.freq_base_swa", 10_000.0),
            norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
            soft_cap=read_soft_cap(metadata),
        )

    def head_dim(self, *, is_local: bool) -> int:
        """Return the size of a head of one kind of layers; 2 if there are none."""
        return next((x.head_dim for x in self.layers if x.is_local == is_local), 2)


def _layers(metadata: Metadata, num_layers: int) -> Iterator[Gemma4Layer]:
    pattern = "attention.sliding_window_pattern"
    local = metadata.flags(pattern, num_layers)
    if local is None:
        local = tuple((layer + 1) % 6 != 0 for layer in range(num_layers))
    num_kv_heads = metadata.sizes("attention.head_count_kv", num_layers)
    ffn_sizes = metadata.sizes("feed_forward_length", num_layers)
    head_dims = {}
    for is_local, suffix in ((False, ""), (True, "_swa")):
        head_dims[is_local] = metadata.size(f"attention.key_length{suffix}")
        metadata.require_equal(f"attention.value_length{suffix}", head_dims[is_local])
        metadata.require_rotated(head_dims[is_local], suffix)
    first_shared = num_layers - metadata.count("attention.shared_kv_layers")
    owners: dict[bool, int] = {}
    numbers = count()
    for layer, is_local in enumerate(local):
        owns_kv = layer < first_shared
        if owns_kv:
            owners[is_local] = next(numbers)
        elif is_local not in owners:
            raise GGUFInvalid(metadata.key(pattern), 0, f"layer {layer} has no keys to share")
        yield Gemma4Layer(
            is_local=is_local,
            num_kv_heads=num_kv_heads[layer],
            head_dim=head_dims[is_local],
            ffn_size=ffn_sizes[layer],
            kv_layer=owners[is_local],
            owns_kv=owns_kv,
        )


@dataclass(frozen=True, slots=True)
class Gemma4KV:
    """How a layer makes keys and values.

    Attributes:
        projection: Gives K, then V unless `k_is_v`.
        k_is_v: Whether V is K before its norm and rotation.
        k_norm: Of each key head.
        v_norm: Of each value head; it has no weights.
    """

    projection: Linear
    k_is_v: bool
    k_norm: Norm
    v_norm: Norm


@dataclass(frozen=True, slots=True)
class Gemma4Attention:
    """Attention on normalised queries, keys and values.

    Attributes:
        query: Projection of Q.
        q_norm: Of each query head.
        own: Of K and V; `None` for a layer that reads another's.
        output: Of the mixed heads.
        kv: Its pages.
        head_dim: Values a head.
        rotary: Which angles of the step it takes.
    """

    query: Linear
    q_norm: Norm
    own: Gemma4KV | None
    output: Linear
    kv: PagedKV
    head_dim: int
    rotary: int

    def __call__(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """Mix the rows of every sequence; see `Mixer`."""
        q = self.q_norm(self.query(h).view(len(h), -1, self.head_dim))
        q = rope(q, *step.angles[self.rotary])
        if self.own is not None:
            self.kv.store(*self._keys_and_values(self.own, h, step), step)
        return self.output(self.kv.read(q, step))

    def _keys_and_values(
        self, own: Gemma4KV, h: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = own.projection(h).view(len(h), -1, self.head_dim)
        k, v = (heads, heads) if own.k_is_v else heads.chunk(2, dim=1)
        return rope(own.k_norm(k), *step.angles[self.rotary]), own.v_norm(v)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What token ids give to every layer: vectors of their own, joined with the token's vector.

    Attributes:
        table: Vectors of all layers side by side.
        projection: Of the token's vector, likewise.
        norm: Of a layer's projected part.
        size: Values a layer.
    """

    table: PackedEmbedding
    projection: Linear
    norm: Norm
    size: int

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `[N, layers, P]` for token ids `[N]` and their scaled vectors `[N, H]`."""
        own = self.table(token_ids).view(len(x), -1, self.size) * sqrt(self.size)
        projected = (self.projection(x) / sqrt(x.shape[1])).view_as(own)
        return (self.norm(projected) + own) * sqrt(0.5)


@dataclass(frozen=True, slots=True)
class LayerInputBlock:
    """A block that is followed by its layer's input.

    Attributes:
        block: The rest of the layer, without a factor.
        index: Of the layer.
        gate: From the hidden size to that of the input.
        projection: Back.
        norm: Of what is added.
        scale: Factor of the layer's output.
    """

    block: Mixer
    index: int
    gate: Linear
    projection: Linear
    norm: Norm
    scale: float

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """See `Mixer`."""
        assert step.layer_inputs is not None
        x = self.block(x, step)
        gated = gelu_tanh(self.gate(x)) * step.layer_inputs[:, self.index]
        return (x + self.norm(self.projection(gated))) * self.scale


class Gemma4(Decoder):
    """A gemma4 file; `layer_inputs` is there in the smallest models only."""

    layer_inputs: LayerInputs | None = None

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
        config = Gemma4Config.from_metadata(metadata)
        reader = WeightReader(file, dtype=dtype, device=device, form=form)
        embedding, head = read_tables(reader, metadata, config.hidden_size)
        parts = DecoderParts(
            embedding=embedding,
            blocks=tuple(_read_block(reader, config, i) for i in range(len(config.layers))),
            norm=reader.norm("output_norm.weight", config.hidden_size, config.norm_eps),
            head=head,
            frequencies=tuple(f.to(device) for f in _frequencies(reader, config)),
            embedding_scale=config.hidden_size**0.5,
            soft_cap=config.soft_cap,
        )
        model = cls(
            parts,
            vocab_size=metadata.vocab_size(),
            context_tokens=config.context_tokens,
            kv_layout=KVLayout(cls.shape(file).kv_layers, dtype),
        )
        if config.layer_input_size:
            model.layer_inputs = _read_layer_inputs(reader, config)
        reader.require_all_used()
        return model

    @classmethod
    def shape(cls, file: GGUFFile) -> SequenceShape:
        """Say what the file's model keeps of a sequence."""
        config = Gemma4Config.from_metadata(Metadata(file))
        owners = [layer for layer in config.layers if layer.owns_kv]
        return SequenceShape(
            config.context_tokens, tuple(LayerKV(x.num_kv_heads, x.head_dim) for x in owners)
        )

    def embed(self, step: Step) -> tuple[torch.Tensor, Step]:
        """See `Decoder`."""
        x, step = super().embed(step)
        if self.layer_inputs is None:
            return x, step
        return x, replace(step, layer_inputs=self.layer_inputs(step.batch.token_ids, x))


def _read_layer_inputs(reader: WeightReader, config: Gemma4Config) -> LayerInputs:
    table = "per_layer_token_embd.weight"
    size = config.layer_input_size
    width = size * len(config.layers)
    return LayerInputs(
        table=reader.packed_embedding(table, reader.rows(table), width),
        projection=reader.linear(
            ["per_layer_model_proj.weight"], in_features=config.hidden_size, out_features=[width]
        ),
        norm=reader.norm("per_layer_proj_norm.weight", size, config.norm_eps),
        size=size,
    )


def _frequencies(reader: WeightReader, config: Gemma4Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of layers that see all, most of them divided to nothing, and of the others."""
    head_dim = config.head_dim(is_local=False)
    frequencies = inverse_frequencies(config.theta_global, head_dim)
    if reader.has("rope_freqs.weight"):
        divisors = reader.vector("rope_freqs.weight", head_dim // 2)
        frequencies = frequencies / divisors.to(frequencies.device)
    local = inverse_frequencies(config.theta_local, config.head_dim(is_local=True))
    return frequencies, local


def _read_block(reader: WeightReader, config: Gemma4Config, index: int) -> Mixer:
    prefix = f"blk.{index}."
    scale = 1.0
    if reader.has(f"{prefix}layer_output_scale.weight"):
        scale = reader.vector(f"{prefix}layer_output_scale.weight", 1).item()
    hidden, size = config.hidden_size, config.layer_input_size
    has_input = size > 0
    block = read_sandwich(
        reader,
        prefix,
        mixer=_read_attention(reader, config, config.layers[index], prefix),
        hidden_size=hidden,
        ffn_size=config.layers[index].ffn_size,
        eps=config.norm_eps,
        scale=1.0 if has_input else scale,
    )
    if not has_input:
        return block
    return LayerInputBlock(
        block=block,
        index=index,
        gate=reader.linear([f"{prefix}inp_gate.weight"], in_features=hidden, out_features=[size]),
        projection=reader.linear([f"{prefix}proj.weight"], in_features=size, out_features=[hidden]),
        norm=reader.norm(f"{prefix}post_norm.weight", hidden, config.norm_eps),
        scale=scale,
    )


def _read_attention(
    reader: WeightReader, config: Gemma4Config, layer: Gemma4Layer, prefix: str
) -> Gemma4Attention:
    size = config.num_heads * layer.head_dim
    return Gemma4Attention(
        query=reader.linear(
            [f"{prefix}attn_q.weight"], in_features=config.hidden_size, out_features=[size]
        ),
        q_norm=reader.norm(f"{prefix}attn_q_norm.weight", layer.head_dim, config.norm_eps),
        own=_read_kv(reader, config, layer, prefix) if layer.owns_kv else None,
        output=reader.linear(
            [f"{prefix}attn_output.weight"], in_features=size, out_features=[config.hidden_size]
        ),
        kv=PagedKV(layer.kv_layer, 1.0, config.window if layer.is_local else None),
        head_dim=layer.head_dim,
        rotary=LOCAL if layer.is_local else GLOBAL,
    )


def _read_kv(
    reader: WeightReader, config: Gemma4Config, layer: Gemma4Layer, prefix: str
) -> Gemma4KV:
    k_is_v = not reader.has(f"{prefix}attn_v.weight")
    names = "k" if k_is_v else "kv"
    k_norm = reader.norm(f"{prefix}attn_k_norm.weight", layer.head_dim, config.norm_eps)
    return Gemma4KV(
        projection=reader.linear(
            [f"{prefix}attn_{name}.weight" for name in names],
            in_features=config.hidden_size,
            out_features=[layer.num_kv_heads * layer.head_dim] * len(names),
        ),
        k_is_v=k_is_v,
        k_norm=k_norm,
        v_norm=Norm(torch.ones_like(k_norm.weight), config.norm_eps),
    )
