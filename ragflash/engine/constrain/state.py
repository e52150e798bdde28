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
        """Whether the part cannot go on; where it cannot end either, its output is cut."""

    @property
    def num_skipped(self) -> int:
        """How many of the parts that follow are left out when the part ends here."""

    def mask(self) -> TokenMask:
        """Return the tokens that continue the part."""

    def permits(self, token_id: int) -> bool:
        """Tell whether `mask` has a token; may cost less."""

    def forced(self) -> tuple[int, ...]:
        """Return tokens that continue the part where it leaves no choice, the first at least."""

    def step(self, token_id: int) -> "State":
        """Return the state after a token that `mask` permits."""
