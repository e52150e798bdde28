"""A DFlash drafter: one pass over a block of masks predicts all its tokens at once.

Z Lab 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv:2602.06036, and its
second form with a convolution and a selector. Keys and values of the target's tokens depend on the
target's features alone, so each token's are computed once and kept, never the features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragflash.models.dflash.config import DFlashConfig, Target
from ragflash.models.dflash.context import Candidates, DraftContext
from ragflash.models.dflash.layers import DraftLayer
from ragflash.models.dflash.ring import RING_TOKENS, KVRing
from ragflash.models.dflash.selector import PathSelector
from ragflash.models.layers import Angles, Norm
from ragflash.models.linear import Linear


@dataclass(frozen=True, slots=True)
class DFlashParts:
    """A drafter's weights.

    Attributes:
        features: Joins the taps of a token, `[taps · H]` to `[H]`.
        features_norm: Of the joined.
        layers: In order.
        norm: Before the target's head.
        frequencies: Angle a position of each pair of dimensions, `[D / 2]` float32.
        selector: DFlash 2 only.
    """

    features: Linear
    features_norm: Norm
    layers: tuple[DraftLayer, ...]
    norm: Norm
    frequencies: torch.Tensor
    selector: PathSelector | None = None


class DFlashModel:
    """A loaded drafter, shared by all sequences; called from the worker thread only.

    Args:
        config: Its sizes.
        parts: Its weights.
        target: The model whose tokens it drafts.
        dtype: What it computes in; norms, softmax and log-probabilities are float32.
        max_rows: Rows that its matrices take at once; `None` for any number.

    Attributes:
        config: As given.
        parts: As given.
        target: As given.
        dtype: As given.
    """

    def __init__(
        self,
        config: DFlashConfig,
        parts: DFlashParts,
        target: Target,
        dtype: torch.dtype,
        max_rows: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.parts = parts
        self.target = target
        self._max_rows = max_rows

    def new_ring(self, num_tokens: int = RING_TOKENS) -> KVRing:
        """Return an empty ring of this drafter's shape."""
        config = self.config
        return KVRing(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            dtype=self.dtype,
            device=self.parts.frequencies.device,
            num_tokens=num_tokens,
        )

    @torch.no_grad()
    def context(self, features: torch.Tensor, position: int) -> torch.Tensor:
        """Return keys and values `[2, L, N, Hkv, D]` of tokens of the target.

        Args:
            features: Their taps side by side, `[N, taps · H]`, N ≥ 1.
            position: Of the first of them.
        """
        parts, size = [], self._max_rows or len(features)
        for start in range(0, len(features), size):
            rows = features[start : start + size].to(self.dtype)
            joined = self.parts.features_norm(self.parts.features(rows))
            angles = self._angles(position + start, len(rows))
            kept = [layer.attention.keys_values(joined, angles) for layer in self.parts.layers]
            parts.append(torch.stack(kept, dim=1))
        return torch.cat(parts, dim=2)

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int], context: KVRing) -> torch.Tensor:
        """Return the rows `[N, H]` of a block behind the context, after the last norm."""
        ids = torch.tensor(token_ids, device=self.parts.frequencies.device)
        x = self.target.embed(ids).to(self.dtype) * self.config.embedding_scale
        angles = self._angles(context.end, len(token_ids))
        for layer in self.parts.layers:
            x = layer(x, angles, context)
        return self.parts.norm(x)

    @torch.no_grad()
    def draft(self, pending: int, width: int, top_k: int, context: KVRing) -> Candidates:
        """See `DraftContext.draft`."""
        mask = self.config.mask_token_id
        rows = self.hidden([pending, *[mask] * width], context)[1:]
        logits = self.target.logits(rows * self.config.output_scale)
        selector = self.parts.selector
        if selector is not None:
            top_k = max(top_k, selector.top_k)
        best, token_ids = logits.topk(min(top_k, logits.shape[1]), dim=-1)
        log_probs = best - logits.logsumexp(dim=-1, keepdim=True)
        if selector is None:
            chain = tuple(token_ids[:, 0].tolist())
        else:
            before = torch.tensor([pending], device=token_ids.device)
            chain = tuple(selector.choose(before, rows, token_ids, log_probs).tolist())
        return Candidates(token_ids, log_probs, chain)

    def _angles(self, position: int, num_rows: int) -> Angles:
        frequencies = self.parts.frequencies
        positions = torch.arange(position, position + num_rows, device=frequencies.device)
        angles = positions[:, None].float() * frequencies
        return angles.cos(), angles.sin()


class DraftSequence(DraftContext):
    """Kept by plain torch.

    Args:
        model: The drafter.
        ring_tokens: Newest tokens that are kept, at least the drafter's windows.
    """

    def __init__(self, model: DFlashModel, ring_tokens: int = RING_TOKENS) -> None:
        self._model = model
        self._ring = model.new_ring(ring_tokens)
        super().__init__(model.config, self._ring)

    def _append(self, features: torch.Tensor) -> None:
        self._ring.append(self._model.context(features, self._ring.end))

    def _draft(self, pending: int, width: int, top_k: int) -> Candidates:
        return self._model.draft(pending, width, top_k, self._ring)
