"""The block with which a model predicts the token after the next (multi-token prediction).

DeepSeek-V3 (2024, arXiv:2412.19437), section 2.2. GGUF files call it `nextn` and keep it as the
block after the last.
"""

from dataclasses import dataclass

import torch

from ragflash.models.layers import Mixer, Norm, Step
from ragflash.models.linear import Embedding, Linear, PackedEmbedding


@dataclass(frozen=True, slots=True)
class MtpHead:
    """One block with keys and values of its own, fed by the model or by itself.

    Attributes:
        embedding: Token vectors, the model's unless the file has others.
        embedding_norm: Of them.
        hidden_norm: Of the hidden rows.
        join: Of both side by side, the embedding first.
        block: An attention block like the model's.
        norm: Of what the block gives.
        head: Gives logits, the model's unless the file has another.
    """

    embedding: Embedding | PackedEmbedding
    embedding_norm: Norm
    hidden_norm: Norm
    join: Linear
    block: Mixer
    norm: Norm
    head: Linear

    @torch.no_grad()
    def hidden(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Go one token further.

        Args:
            hidden: `[N, H]`, of the tokens at the step's positions, after the model's last norm
                (`Decoder.final_hidden`) or as this method returned it.
            step: `token_ids` are those that follow at each position; pages take this block's keys
                and values at the same positions.

        Returns:
            `[N, H]`, from which `logits` predicts the tokens after those.
        """
        embedded = self.embedding_norm(self.embedding(step.batch.token_ids))
        joined = self.join(torch.cat((embedded, self.hidden_norm(hidden)), dim=-1))
        return self.norm(self.block(joined, step))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[N, V]` of what `hidden` returned."""
        return self.head(hidden).float()
