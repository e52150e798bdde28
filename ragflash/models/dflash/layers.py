"""One layer of a drafter: the block's rows attend to the target's tokens and to each other."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from ragflash.models.dflash.conv import DynamicConv
from ragflash.models.dflash.ring import KVRing
from ragflash.models.layers import Angles, GatedFFN, Norm
from ragflash.models.linear import Linear
from ragflash_kernels.rope import rope


@dataclass(frozen=True, slots=True)
class DraftAttention:
    """Attention whose keys and values come from the target's features and from the block.

    Attributes:
        index: The layer's number in the ring.
        query: Gives all heads of Q.
        key_value: Gives all heads of K, then of V.
        output: Of the mixed heads.
        q_norm: Of each query head before rotation.
        k_norm: Of each key head before rotation.
        num_kv_heads: Heads of K, and of V.
        head_dim: Values a head.
        window: Positions a row sees, itself included, and as far ahead if it is not causal;
            `None` for all.
        is_causal: Whether rows do not see those after them.
    """

    index: int
    query: Linear
    key_value: Linear
    output: Linear
    q_norm: Norm
    k_norm: Norm
    num_kv_heads: int
    head_dim: int
    window: int | None
    is_causal: bool

    def keys_values(self, rows: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Return keys and values `[2, N, Hkv, D]` of features or of the block's rows."""
        heads = self.key_value(rows).view(len(rows), 2 * self.num_kv_heads, self.head_dim)
        keys, values = heads.chunk(2, dim=1)
        return torch.stack((rope(self.k_norm(keys), *angles), values))

    def __call__(self, h: torch.Tensor, angles: Angles, context: KVRing) -> torch.Tensor:
        """Mix the block's rows `[N, H]`, which come behind the context."""
        q = self.query(h).view(len(h), -1, self.head_dim)
        q = rope(self.q_norm(q), *angles)
        own_keys, own_values = self.keys_values(h, angles)
        keys, values = context.newest(self.index, self.window and self.window - 1)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            torch.cat((keys, own_keys)).transpose(0, 1)[None],
            torch.cat((values, own_values)).transpose(0, 1)[None],
            attn_mask=self._visible(len(keys), len(h), h.device),
            enable_gqa=True,
        )
        return self.output(mixed[0].transpose(0, 1).reshape(len(h), -1))

    def _visible(
        self, num_context: int, num_rows: int, device: torch.device
    ) -> torch.Tensor | None:
        """Which of context and block each row sees, `[N, C + N]`; `None` for all."""
        if self.window is None and not self.is_causal:
            return None
        rows = torch.arange(num_rows, device=device)[:, None]
        behind = rows - torch.arange(-num_context, num_rows, device=device)
        visible = torch.ones_like(behind, dtype=torch.bool)
        if self.window is not None:
            visible &= behind.abs() < self.window
        return visible & (behind >= 0) if self.is_causal else visible


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """A pre-norm layer; DFlash 2 has a convolution around each of its two parts."""

    attention_norm: Norm
    attention: DraftAttention
    ffn_norm: Norm
    ffn: GatedFFN
    attention_conv: DynamicConv | None = None
    ffn_conv: DynamicConv | None = None

    def __call__(self, x: torch.Tensor, angles: Angles, context: KVRing) -> torch.Tensor:
        """Compute the block's rows `[N, H]` from those of the layer before."""

        def attend(h: torch.Tensor) -> torch.Tensor:
            return self.attention(h, angles, context)

        h = self.attention_norm(x)
        x = x + (self.attention_conv(h, attend) if self.attention_conv else attend(h))
        h = self.ffn_norm(x)
        return x + (self.ffn_conv(h, self.ffn) if self.ffn_conv else self.ffn(h))
