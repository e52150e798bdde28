"""GGUF architecture `qwen35moe`: the mixtures of Qwen3.5 and 3.6, such as 35B-A3B."""

from collections.abc import Callable

import torch

from ragflash.errors import GGUFInvalid
from ragflash.models.metadata import Metadata
from ragflash.models.moe import ExpertMatrices, Experts, SharedExpertFFN
from ragflash.models.qwen35 import FFNReader, Qwen35
from ragflash.models.weights import WeightReader


class Qwen35Moe(Qwen35):
    """A qwen35moe file: as qwen35, but each token uses a few experts and a shared one."""

    @classmethod
    def _ffn_reader(cls, metadata: Metadata, reader: WeightReader, hidden_size: int) -> FFNReader:
        num_experts, num_used = metadata.size("expert_count"), metadata.size("expert_used_count")
        if num_used > num_experts:
            raise GGUFInvalid(
                metadata.key("expert_used_count"), 0, f"{num_used} of {num_experts} experts"
            )
        expert_size = metadata.size("expert_feed_forward_length")
        shared_size = metadata.size("expert_shared_feed_forward_length", expert_size)

        def read(prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
            def experts(part: str, in_features: int, out_features: int) -> ExpertMatrices:
                return reader.experts(
                    f"{prefix}ffn_{part}_exps.weight", num_experts, in_features, out_features
                )

            fused = reader.has(f"{prefix}ffn_gate_up_exps.weight")
            parts = ["gate_up"] if fused else ["gate", "up"]
            width = 2 * expert_size // len(parts)
            return SharedExpertFFN(
                experts=Experts(
                    router=reader.linear(
                        [f"{prefix}ffn_gate_inp.weight"],
                        in_features=hidden_size,
                        out_features=[num_experts],
                    ),
                    gate_up=tuple(experts(part, hidden_size, width) for part in parts),
                    down=experts("down", expert_size, hidden_size),
                    num_used=num_used,
                ),
                shared=reader.gated_ffn(
                    prefix, hidden_size=hidden_size, ffn_size=shared_size, suffix="_shexp"
                ),
                shared_gate=reader.vector(f"{prefix}ffn_gate_inp_shexp.weight", hidden_size),
            )

        return read
