"""A DFlash drafter: one pass over a block of masks predicts all its tokens at once.

Z Lab 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv:2602.06036, and its
second form with a convolution and a selector. Keys and values of the target's tokens depend on the
target's features alone, so each token's are computed once and kept, never the features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragflash.models.dflash.config import MAX_CANDIDATES, DFlashConfig, Target
from ragflash.models.dflash.layers import DraftLayer
from ragflash.models.dflash.ring import RING_TOKENS, KVRing
from ragflash.models.dflash.selector import PathSelector
from ragflash.models.layers import Angles, Norm
from ragflash.models.linear import Linear


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a drafter says of the tokens behind a pending one.

    Slots are predicted side by side: the probabilities of one do not depend on the tokens chosen
    in those before it. Whatever is proposed from them is verified as a one-point distribution.

    Attributes:
        token_ids: `[S, K]` int64, each slot's most probable tokens, the best first.
        log_probs: Theirs among the whole vocabulary, `[S, K]` float32.
        chain: One token a slot: the most probable, or in DFlash 2 the selector's choice.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    chain: tuple[int, ...]


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
        self._parts = parts
        self._target = target
        self._max_rows = max_rows

    def new_ring(self, num_tokens: int = RING_TOKENS) -> KVRing:
        """Return an empty ring of this drafter's shape."""
        config = self.config
        return KVRing(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            dtype=self.dtype,
            device=self._parts.frequencies.device,
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
            joined = self._parts.features_norm(self._parts.features(rows))
            angles = self._angles(position + start, len(rows))
            kept = [layer.attention.keys_values(joined, angles) for layer in self._parts.layers]
            parts.append(torch.stack(kept, dim=1))
        return torch.cat(parts, dim=2)

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int], context: KVRing) -> torch.Tensor:
        """Return the rows `[N, H]` of a block behind the context, after the last norm."""
        ids = torch.tensor(token_ids, device=self._parts.frequencies.device)
        x = self._target.embed(ids).to(self.dtype) * self.config.embedding_scale
        angles = self._angles(context.end, len(token_ids))
        for layer in self._parts.layers:
            x = layer(x, angles, context)
        return self._parts.norm(x)

    @torch.no_grad()
    def draft(self, pending: int, width: int, top_k: int, context: KVRing) -> Candidates:
        """See `DraftSequence.draft`."""
        mask = self.config.mask_token_id
        rows = self.hidden([pending, *[mask] * width], context)[1:]
        logits = self._target.logits(rows * self.config.output_scale)
        selector = self._parts.selector
        if selector is not None:
            top_k = max(top_k, selector.top_k)
        best, token_ids = logits.topk(min(top_k, logits.shape[1]), dim=-1)
        log_probs = best - logits.logsumexp(dim=-1, keepdim=True)
        if selector is None:
            chain = tuple(token_ids[:, 0].tolist())
        else:
            chain = selector.choose(pending, rows, token_ids, log_probs)
        return Candidates(token_ids, log_probs, chain)

    def _angles(self, position: int, num_rows: int) -> Angles:
        frequencies = self._parts.frequencies
        positions = torch.arange(position, position + num_rows, device=frequencies.device)
        angles = positions[:, None].float() * frequencies
        return angles.cos(), angles.sin()


class DraftSequence:
    """One sequence's context of a drafter.

    Features are appended for tokens that the target has committed, never for rejected ones; the
    pending token, sampled and not yet computed, has none.

    Args:
        model: The drafter.
        ring_tokens: Newest tokens that are kept, at least the drafter's windows.
    """

    def __init__(self, model: DFlashModel, ring_tokens: int = RING_TOKENS) -> None:
        self._model = model
        self._ring = model.new_ring(ring_tokens)

    @property
    def position(self) -> int:
        """Of the token whose features come next, which is the pending one's."""
        return self._ring.end

    def append(self, features: torch.Tensor) -> None:
        """Take the features `[N, taps · H]`, N ≥ 1, of the tokens from `position` on.

        Those that would not stay in the ring cost nothing; a long prompt may leave them out with
        `restart` instead.
        """
        kept = features[-self._ring.num_tokens :]
        if len(kept) < len(features):
            self._ring.restart(self._ring.end + len(features) - len(kept))
        self._ring.append(self._model.context(kept, self._ring.end))

    def draft(self, pending: int, position: int, width: int, top_k: int = 8) -> Candidates:
        """Predict the tokens behind the pending one, in one pass.

        Args:
            pending: The newest token.
            position: Its position.
            width: Slots to predict, 1 to the trained block size − 1.
            top_k: Tokens a slot, up to 16; DFlash 2 returns at least as many as its selector sees.

        Raises:
            ValueError: An argument is outside its range, or features of tokens before the pending
                one are missing.
        """
        if position != self.position:
            raise ValueError(f"features end at {self.position}, the pending token is at {position}")
        if not 1 <= width < self._model.config.block_size:
            raise ValueError(f"{width} slots: blocks of {self._model.config.block_size} rows")
        if not 1 <= top_k <= MAX_CANDIDATES:
            raise ValueError(f"top_k = {top_k} is not within 1…{MAX_CANDIDATES}")
        return self._model.draft(pending, width, top_k, self._ring)

    def truncate(self, position: int) -> None:
        """Forget the features of tokens from a position on."""
        self._ring.truncate(position)

    def restart(self, position: int) -> None:
        """Forget all features; the next are those of the token at a position."""
        self._ring.restart(position)

    def export(self) -> bytes:
        """Return the state, so that a sequence that `load`s it drafts the same."""
        return self._ring.export()

    def load(self, state: bytes) -> None:
        """Take over a state; raises `ValueError` for one of another drafter."""
        self._ring.load(state)
