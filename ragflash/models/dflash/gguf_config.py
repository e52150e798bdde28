"""The metadata of a drafter's GGUF file, in each of the dialects that converters write.

`dflash` is llama.cpp's; `dflash-draft` BeeLlama's; `qwen35-dflash-draft` and `gemma4-dflash-draft`
Lucebox's. They name the same things differently, and count the target's layers differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ragflash.errors import ArchitectureUnknown
from ragflash.gguf.reader import GGUFFile
from ragflash.models.dflash.config import Causality, ConvConfig, DFlashConfig, Given, SelectorConfig
from ragflash.models.dflash.facts import Facts
from ragflash.models.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Dialect:
    """What sets a dialect apart.

    Attributes:
        tap_offset: What its numbers of the target's layers are too high by: llama.cpp names the
            layer that a tap is the input of, the others the layer that it is the output of.
        says_causality: Whether its converter always writes `attention.causal`. Where it never
            does, Z Lab's rule holds: layers with a window are causal.
    """

    tap_offset: int
    says_causality: bool


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "dflash": Dialect(tap_offset=1, says_causality=True),
        "dflash-draft": Dialect(tap_offset=0, says_causality=True),
        "gemma4-dflash-draft": Dialect(tap_offset=0, says_causality=False),
        "qwen35-dflash-draft": Dialect(tap_offset=0, says_causality=False),
    }
)
TAPS = ("dflash.target_layer_ids", "dflash.target_layers", "target_layer_ids", "target_layers")
PATTERN = "attention.sliding_window_pattern"


def config_from_gguf(file: GGUFFile, given: Given) -> DFlashConfig:
    """Read the metadata.

    Raises:
        ArchitectureUnknown: It is no drafter's.
        DrafterIncomplete: It lacks what every dialect should say.
        ModelError: A value makes no sense, or asks for what is not implemented.
    """
    metadata = Metadata(file)
    dialect = DIALECTS.get(metadata.architecture)
    if dialect is None:
        raise ArchitectureUnknown(
            f"the drafter's architecture is {metadata.architecture!r}; ragflash drafts with: "
            f"{', '.join(sorted(DIALECTS))}"
        )
    metadata.refuse_rope_scaling()
    hidden_size = metadata.size("embedding_length")
    num_layers = metadata.num_layers()
    num_heads, num_kv_heads, head_dim = metadata.heads(hidden_size)
    metadata.require_rotated(head_dim)
    facts = Facts(file.path.name)
    theta = "rope.freq_base"
    config = DFlashConfig(
        hidden_size=hidden_size,
        ffn_size=metadata.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope_theta=facts.need(
            metadata.number(theta) if metadata.has(theta) else None, metadata.key(theta), 1.0
        ),
        windows=given.windows or _windows(metadata, facts, num_layers),
        causality=given.causality or _causality(metadata, facts, dialect),
        block_size=_size(metadata, facts, "block_size"),
        mask_token_id=_mask(metadata, facts),
        tap_layers=given.tap_layers or _taps(metadata, facts, dialect),
        embedding_scale=given.embedding_scale or 1.0,
        output_scale=metadata.number("logit_scale", 1.0),
        soft_cap=_soft_cap(metadata),
        conv=_conv(metadata, facts),
        selector=_selector(metadata, facts),
    )
    facts.close()
    return config


def _named(metadata: Metadata, name: str) -> str | None:
    """The name that a file has for a value of the drafter's own, below `dflash.` or not."""
    return next((known for known in (f"dflash.{name}", name) if metadata.has(known)), None)


def _size(metadata: Metadata, facts: Facts, name: str) -> int:
    known = _named(metadata, name)
    return facts.need(metadata.size(known) if known else None, metadata.key(name), 1)


def _mask(metadata: Metadata, facts: Facts) -> int:
    known = _named(metadata, "mask_token_id")
    key = metadata.key(known) if known else "tokenizer.ggml.mask_token_id"
    return facts.need(metadata.file.get(key, int), key, 0)


def _taps(metadata: Metadata, facts: Facts, dialect: Dialect) -> tuple[int, ...]:
    known = next((name for name in TAPS if metadata.has(name)), TAPS[0])
    key = metadata.key(known)
    taps = facts.need(metadata.file.get_array(key, int), key, ())
    return tuple(tap - dialect.tap_offset for tap in taps)


def _windows(metadata: Metadata, facts: Facts, num_layers: int) -> tuple[int | None, ...]:
    """Without a pattern, a file with no window cannot be told from one that lost it."""
    flags = metadata.flags(PATTERN, num_layers)
    pattern = facts.need(flags, metadata.key(PATTERN), (False,) * num_layers)
    if not any(pattern):
        return (None,) * num_layers
    known = next((x for x in ("attention", "dflash") if metadata.has(f"{x}.sliding_window")), None)
    window = facts.need(
        metadata.size(f"{known}.sliding_window") if known else None,
        metadata.key("attention.sliding_window"),
        1,
    )
    return tuple(window if slides else None for slides in pattern)


def _causality(metadata: Metadata, facts: Facts, dialect: Dialect) -> Causality:
    key = metadata.key("attention.causal")
    says = metadata.file.get(key, bool)
    if says is None and not dialect.says_causality:
        return Causality.SLIDING
    return Causality.ALWAYS if facts.need(says, key, stand_in=False) else Causality.NEVER


def _soft_cap(metadata: Metadata) -> float | None:
    names = ("final_logit_softcapping", "dflash.logit_softcap")
    known = next((name for name in names if metadata.has(name)), None)
    return metadata.number(known) if known else None


def _conv(metadata: Metadata, facts: Facts) -> ConvConfig | None:
    if not _is_second(metadata):
        return None
    return ConvConfig(
        num_taps=_size(metadata, facts, "conv_kernel_size"),
        group_size=_size(metadata, facts, "conv_group_size"),
    )


def _selector(metadata: Metadata, facts: Facts) -> SelectorConfig | None:
    if not _is_second(metadata):
        return None
    return SelectorConfig(
        rank=_size(metadata, facts, "selector_rank"),
        top_k=_size(metadata, facts, "selector_top_k"),
    )


def _is_second(metadata: Metadata) -> bool:
    """Whether it is DFlash 2, which has no architecture of its own."""
    return _named(metadata, "selector_top_k") is not None or any(
        name.startswith("selector") for name in metadata.file.tensors
    )
