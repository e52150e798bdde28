"""The contract of a constraint's parts.

A state is a value: `step` returns the next one and changes nothing, so that going back over
rejected tokens is forgetting states, and all parts share one implementation of it (`cursor`).
"""

from typing import Protocol

from ragflash.engine.constrain.mask import TokenMask


class State(Protocol):
    """Where one part of a constraint stands after some of its tokens."""

    @property
    def can_end(self) -> bool:
        """Whether the part is complete as it stands, though it may go on."""

    @property
    def is_done(self) -> bool:
        """Whether the part is complete and cannot go on."""

    def mask(self) -> TokenMask:
        """Return the tokens that continue the part."""

    def step(self, token_id: int) -> "State":
        """Return the state after a token that `mask` permits."""
