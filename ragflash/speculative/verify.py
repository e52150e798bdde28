"""Verification of a drafted chain.

Every row's next token is chosen from the target's own distribution exactly as without a draft, and
the chain holds as long as the choice is the drafted token. A drafted token d, proposed with
certainty, is thereby kept with probability p(d), and a rejection leaves p without d, renormalised:
speculative sampling for a one-point proposal (Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", 2023, theorem 3.5 and algorithm 1). As one uniform number a position
decides, the output is not only distributed alike but the same, token for token, with or without
drafts.
"""

from collections.abc import Callable, Sequence


def verify_chain(
    draft: Sequence[int], choose: Callable[[int], int], emit: Callable[[int], bool]
) -> int:
    """Emit the target's tokens along a draft and return how many drafted tokens became output.

    Args:
        draft: Proposed tokens; row `i` of the forward has seen the first `i` of them.
        choose: Picks the target's token for a row, given all that was emitted before.
        emit: Takes a token as output; false when it is the last one.
    """
    for row, drafted in enumerate(draft):
        token = choose(row)
        goes_on = emit(token)
        if token != drafted:
            return row
        if not goes_on:
            return row + 1
    emit(choose(len(draft)))
    return len(draft)
