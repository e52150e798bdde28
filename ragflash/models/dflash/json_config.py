"""The `config.json` of a drafter as Z Lab publishes it, beside safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path

from ragflash.errors import ModelError, ModelMissing
from ragflash.models.dflash.config import (
    Causality,
    ConvConfig,
    DFlashConfig,
    Given,
    SelectorConfig,
    Target,
)
from ragflash.models.dflash.facts import Facts

SLIDING, FULL = "sliding_attention", "full_attention"


def config_from_json(path: Path, target: Target, given: Given) -> DFlashConfig:
    """Read a `config.json`.

    Raises:
        ModelMissing: It cannot be read.
        DrafterIncomplete: It lacks a value.
        ModelError: A value makes no sense, or asks for what is not implemented.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelMissing(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("dflash_config", {}), dict):
        raise ModelError(f"{path} does not describe a DFlash drafter")
    return _Values(path, values).config(target, given)


class _Values:
    """A file's values. Those of `dflash_config` may stand beside it, as in Z Lab's own reader."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        own, rope = values.get("dflash_config"), values.get("rope_parameters")
        self._values = {
            **values,
            **(rope if isinstance(rope, dict) else {}),
            **(own if isinstance(own, dict) else {}),
        }
        self._path = path
        self._facts = Facts(f"{path.parent.name}/{path.name}")

    def config(self, target: Target, given: Given) -> DFlashConfig:
        self._refuse_others(target)
        config = DFlashConfig(
            hidden_size=self._size("hidden_size"),
            ffn_size=self._size("intermediate_size"),
            num_heads=self._size("num_attention_heads"),
            num_kv_heads=self._size("num_key_value_heads"),
            head_dim=self._size("head_dim"),
            norm_eps=self._number("rms_norm_eps"),
            rope_theta=self._number("rope_theta"),
            windows=given.windows or self._windows(),
            causality=given.causality or self._causality(),
            block_size=self._size("block_size"),
            mask_token_id=self._integer("mask_token_id"),
            tap_layers=given.tap_layers or self._taps(),
            embedding_scale=given.embedding_scale or self._number("input_embedding_scale", 1.0),
            output_scale=self._number("output_multiplier", 1.0),
            soft_cap=self._number("final_logit_softcapping") if self._has_cap() else None,
            conv=self._conv(),
            selector=self._selector(),
        )
        self._facts.close()
        return config

    def _refuse_others(self, target: Target) -> None:
        """Refuse what would change the computation and is not implemented here."""
        for name, known in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("num_target_layers", target.num_layers),
            ("vocab_size", target.vocab_size),
            ("draft_vocab_size", target.vocab_size),
            ("rope_scaling", None),
            ("rope_type", "default"),
            ("partial_rotary_factor", 1.0),
        ):
            value = self._values.get(name)
            if value is not None and value != known:
                raise ModelError(f"{self._path}: {name} is {value!r}, only {known!r} can be used")

    def _integer(self, name: str, least: int = 0) -> int:
        value = self._facts.need(self._values.get(name), name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{self._path}: {name} = {value!r} is no integer from {least} on")
        return value

    def _size(self, name: str) -> int:
        return self._integer(name, 1)

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._facts.need(self._values.get(name, default), name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{self._path}: {name} = {value!r} is not a positive number")
        return float(value)

    def _has_cap(self) -> bool:
        """Z Lab's reader takes 0 and null for no cap."""
        return bool(self._values.get("final_logit_softcapping"))

    def _windows(self) -> tuple[int | None, ...]:
        kinds = self._facts.need(self._values.get("layer_types"), "layer_types", ())
        num_layers = self._size("num_hidden_layers")
        if kinds == ():
            return ()
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or any(kind not in (SLIDING, FULL) for kind in kinds)
        ):
            raise ModelError(f"{self._path}: layer_types = {kinds!r} for {num_layers} layers")
        if SLIDING not in kinds:
            return (None,) * num_layers
        window = self._size("sliding_window")
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def _causality(self) -> Causality:
        """Z Lab's rule: layers with a window are causal unless the file says something of all."""
        says = self._values.get("is_causal")
        if says is None:
            return Causality.SLIDING
        return Causality.ALWAYS if says else Causality.NEVER

    def _taps(self) -> tuple[int, ...]:
        name = "target_layer_ids"
        taps = self._facts.need(self._values.get(name), name, [0])
        if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
            raise ModelError(f"{self._path}: {name} = {taps!r} is no list of layers")
        return tuple(taps)

    def _is_second(self) -> bool:
        """Whether it is DFlash 2."""
        return any(name in self._values for name in ("conv_kernel_size", "selector_top_k"))

    def _conv(self) -> ConvConfig | None:
        if not self._is_second():
            return None
        return ConvConfig(self._size("conv_kernel_size"), self._size("conv_group_size"))

    def _selector(self) -> SelectorConfig | None:
        if not self._is_second():
            return None
        return SelectorConfig(self._size("selector_rank"), self._size("selector_top_k"))
