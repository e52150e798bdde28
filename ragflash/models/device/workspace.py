"""What a programme needs of a card beside weights and pages."""

import torch

from ragflash.models.device.programme import FusedAttention, FusedDeltaNet, Programme
from ragflash_kernels.gated_delta import DeltaStates
from ragflash_kernels.prefill_attention import PrefillWorkspace


def windows_of(programme: Programme) -> tuple[int | None, ...]:
    """Return the distinct attention windows of the layers, at least one."""
    mixers = [block.mixer for block in programme.blocks]
    windows = [mixer.kv.window for mixer in mixers if isinstance(mixer, FusedAttention)]
    return tuple(dict.fromkeys(windows)) or (None,)


def states_of(programme: Programme, max_slots: int, device: torch.device) -> DeltaStates | None:
    """Return states of empty sequences; `None` where no layer has any."""
    mixers = [block.mixer for block in programme.blocks]
    deltas = [mixer for mixer in mixers if isinstance(mixer, FusedDeltaNet)]
    if not deltas:
        return None
    return DeltaStates.allocate(deltas[0].sizes, layers=len(deltas), slots=max_slots, device=device)


def scratch_of(
    programme: Programme, chunk_tokens: int, device: torch.device
) -> PrefillWorkspace | None:
    """Return what attention of many rows works in; `None` where no layer attends."""
    mixers = [block.mixer for block in programme.blocks]
    attentions = [mixer for mixer in mixers if isinstance(mixer, FusedAttention)]
    if not attentions:
        return None
    return PrefillWorkspace(
        max_rows=chunk_tokens,
        num_heads=max(mixer.num_heads for mixer in attentions),
        num_kv_heads=max(mixer.num_kv_heads for mixer in attentions),
        head_dim=max(mixer.sizes.head_dim for mixer in attentions),
        device=device,
    )


def largest_matrix(programme: Programme) -> int:
    """Return the values of the largest matrix that many rows multiply with."""
    largest = 0
    for block in programme.blocks:
        mixer = block.mixer
        matrices = [block.ffn.gate_up, block.ffn.down]
        if isinstance(mixer, FusedAttention | FusedDeltaNet):
            matrices += [mixer.projections, mixer.output]
        largest = max(largest, *(matrix.largest_values for matrix in matrices))
    return largest
