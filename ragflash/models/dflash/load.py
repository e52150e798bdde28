"""Loads a drafter from any of its files: GGUF in four dialects, or a folder of safetensors."""

import hashlib
from pathlib import Path

import torch

from ragflash.errors import TensorMissing
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.models.decoder import inverse_frequencies
from ragflash.models.dflash.config import DFlashConfig, Given, Target
from ragflash.models.dflash.conv import DynamicConv
from ragflash.models.dflash.gguf_config import config_from_gguf
from ragflash.models.dflash.json_config import config_from_json
from ragflash.models.dflash.layers import DraftAttention, DraftLayer
from ragflash.models.dflash.model import DFlashModel, DFlashParts
from ragflash.models.dflash.safetensors_reader import SafetensorsReader
from ragflash.models.dflash.selector import PathSelector
from ragflash.models.dflash.weights import GGUF_NAMES, SAFETENSORS_NAMES, Names, TensorSource
from ragflash.models.layers import GatedFFN, Norm
from ragflash.models.linear import Linear
from ragflash.models.weights import WeightForm, WeightReader
from ragflash_kernels.qmatmul import MAX_ROWS

CONFIG = "config.json"


def load_drafter(
    path: Path,
    target: Target,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    form: WeightForm = "dense",
    given: Given | None = None,
) -> DFlashModel:
    """Load a drafter for a target.

    Args:
        path: A GGUF file, or a folder with `config.json` and safetensors.
        target: The model that is drafted for.
        dtype: What it computes in.
        device: Where its weights lie.
        form: How a GGUF file's matrices are kept (`WeightReader`); safetensors become dense. Those
            in `records` take features in parts of 32 rows.
        given: What the file does not say.

    Raises:
        DrafterIncomplete: The file does not say what it must, and neither does `given`.
        TensorMissing: A tensor is absent or has another shape.
        ModelError: It cannot be used otherwise, or not with this target; the text says why.
    """
    given, max_rows = given or Given(), None
    if (path / CONFIG).is_file():
        config = config_from_json(path / CONFIG, target, given)
        with SafetensorsReader(path, dtype=dtype, device=device) as reader:
            parts = _Builder(reader, SAFETENSORS_NAMES, config, target).parts(device)
    else:
        with GGUFFile.open(path) as file:
            config = config_from_gguf(file, given)
            source = WeightReader(file, dtype=dtype, device=device, form=form)
            parts = _Builder(source, GGUF_NAMES, config, target).parts(device)
        max_rows = MAX_ROWS if form == "records" else None
    return DFlashModel(config, parts, target, dtype, max_rows)


def drafter_hash(path: Path, cache_dir: Path | None = None) -> str:
    """Return the content hash of all files of a drafter; see `content_hash`.

    Raises:
        ModelMissing: A file cannot be read.
        StorageError: The cache folder cannot be read or written.
    """
    if not (path / CONFIG).is_file():
        return content_hash(path, cache_dir)
    files = [path / CONFIG, *sorted(path.glob("*.safetensors"))]
    hashes = [content_hash(file, cache_dir) for file in files]
    return hashlib.sha256("\n".join(hashes).encode("ascii")).hexdigest()


class _Builder:
    """Puts a drafter together from tensors of either kind of file."""

    def __init__(
        self, source: TensorSource, names: Names, config: DFlashConfig, target: Target
    ) -> None:
        config.require_fit(target)
        self._source = source
        self._names = names
        self._config = config
        self._target = target

    def parts(self, device: torch.device | str) -> DFlashParts:
        """Read everything; a tensor that has no place here is refused."""
        config = self._config
        parts = DFlashParts(
            features=self._linear(["features"], config.feature_size, [config.hidden_size]),
            features_norm=self._norm("features_norm", config.hidden_size),
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            norm=self._norm("norm", config.hidden_size),
            frequencies=inverse_frequencies(config.rope_theta, config.head_dim).to(device),
            selector=self._selector(),
        )
        self._source.require_all_used()
        return parts

    def _name(self, part: str, index: int) -> str:
        known = [name.format(index) for name in self._names[part]]
        for name in known:
            if self._source.has(name):
                return name
        raise TensorMissing(f"the drafter has no tensor {' or '.join(map(repr, known))}")

    def _linear(
        self, parts: list[str], in_features: int, out_features: list[int], index: int = 0
    ) -> Linear:
        names = [self._name(part, index) for part in parts]
        return self._source.linear(names, in_features=in_features, out_features=out_features)

    def _norm(self, part: str, size: int, index: int = 0) -> Norm:
        return self._source.norm(self._name(part, index), size, self._config.norm_eps)

    def _layer(self, index: int) -> DraftLayer:
        hidden, ffn = self._config.hidden_size, self._config.ffn_size
        return DraftLayer(
            attention_norm=self._norm("attention_norm", hidden, index),
            attention=self._attention(index),
            ffn_norm=self._norm("ffn_norm", hidden, index),
            ffn=GatedFFN(
                self._linear(["gate", "up"], hidden, [ffn, ffn], index),
                self._linear(["down"], ffn, [hidden], index),
            ),
            attention_conv=self._conv("attention_conv", index),
            ffn_conv=self._conv("ffn_conv", index),
        )

    def _attention(self, index: int) -> DraftAttention:
        config = self._config
        queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        return DraftAttention(
            index=index,
            query=self._linear(["query"], config.hidden_size, [queries], index),
            key_value=self._linear(["key", "value"], config.hidden_size, [keys, keys], index),
            output=self._linear(["output"], queries, [config.hidden_size], index),
            q_norm=self._norm("q_norm", config.head_dim, index),
            k_norm=self._norm("k_norm", config.head_dim, index),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.windows[index],
            is_causal=config.is_causal(index),
        )

    def _conv(self, part: str, index: int) -> DynamicConv | None:
        conv, hidden = self._config.conv, self._config.hidden_size
        if conv is None:
            return None
        base = self._source.tensor(self._name(f"{part}_base", index), (2, conv.num_taps, hidden))
        width = 2 * conv.num_taps * (hidden // conv.group_size)
        return DynamicConv(base, self._linear([part], hidden, [width], index), conv.group_size)

    def _selector(self) -> PathSelector | None:
        selector = self._config.selector
        if selector is None:
            return None
        before, after = (
            self._source.packed_embedding(
                self._name(f"selector_{side}", 0), self._target.vocab_size, selector.rank
            )
            for side in ("before", "after")
        )
        hidden = self._linear(["selector"], self._config.hidden_size, [selector.rank])
        return PathSelector(selector.top_k, before, after, hidden)
