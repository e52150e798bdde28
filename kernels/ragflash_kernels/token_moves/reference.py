"""Plain torch."""

import torch


def move_tokens_reference(
    pages: torch.Tensor, starts: torch.Tensor, strides: torch.Tensor, moves: torch.Tensor
) -> None:
    """Read all tokens, then write them; arguments as in `move_tokens`."""
    page, place = moves.view(-1, 2, 2, 1).unbind(2)  # [M, 2, 1], source and target
    source, target = (page * pages.shape[1] + place * strides + starts).unbind(1)
    values = pages.view(-1)
    values[target] = values[source]
