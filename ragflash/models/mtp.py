"""The block with which a model predicts the token after the next (multi-token prediction).

DeepSeek-V3 (2024, arXiv:2412.19437), section 2.2. GGUF files call it `nextn` and keep it as the
block after the last.
"""

from dataclasses import dataclass

import torch

from ragflash.models.layers import Mixer, Norm, Step
from ragflash.models.linear import Embedding, Linear, PackedEmbedding

MAX_DEPTH = 4  # tokens that are drafted in a row


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
        reads_normed: Whether the block was trained on rows after the last norm, its own included,
            as Qwen's are; those of DeepSeek and GLM read rows before it. A wrong choice costs
            acceptance and nothing else.
    """

    embedding: Embedding | PackedEmbedding
    embedding_norm: Norm
    hidden_norm: Norm
    join: Linear
    block: Mixer
    norm: Norm
    head: Linear
    reads_normed: bool = True

    @torch.no_grad()
    def hidden(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Go one token further.

        Args:
            hidden: `[N, H]`, each of the token before the one in the step: of the model, after its
                last norm (`Decoder.final_hidden`) or before it, or as this method returned it.
            step: Its pages take this block's keys and values at its positions.

        Returns:
            `[N, H]`, from which `logits` predicts the tokens after those.
        """
        embedded = self.embedding_norm(self.embedding(step.batch.token_ids))
        joined = self.join(torch.cat((embedded, self.hidden_norm(hidden)), dim=-1))
        x = self.block(joined, step)
        return self.norm(x) if self.reads_normed else x

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[N, V]` of what `hidden` returned."""
        return self.head(hidden if self.reads_normed else self.norm(hidden)).float()
