"""How likely the model held the tokens of an output to be.

A log-probability is of the distribution after penalties, bias and constraint, before temperature
and the cuts: what the model would say to a request of this kind, whatever the sampling. A token
that a constraint leaves no choice about has 0.
"""

from dataclasses import dataclass

MAX_TOP = 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that might have come.

    Attributes:
        token_id: Which one.
        data: Its bytes; none for a control token.
        logprob: In nats.
    """

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the output, and the likeliest ones in its place.

    Attributes:
        chosen: The token.
        top: As many as were asked for, likeliest first, fewer where a constraint permits fewer.
    """

    chosen: Candidate
    top: tuple[Candidate, ...]
