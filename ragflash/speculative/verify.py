"""Verification of a draft, chain or tree.

Every row's next token is chosen from the target's own distribution exactly as without a draft, and
the walk goes on as long as a child of the row carries the choice. A drafted token d, proposed with
certainty, is thereby kept with probability p(d), and a rejection leaves p without d, renormalised:
speculative sampling for a one-point proposal (Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", 2023, theorem 3.5 and algorithm 1), and for siblings what SpecInfer calls
naive sampling (Miao et al. 2023, arXiv:2305.09781). As one uniform number a position decides, the
output is not only distributed alike but the same, token for token, with or without drafts.
"""

from collections.abc import Callable, Sequence

from ragflash.speculative.drafter import Draft


def verify(
    draft: Draft, choose: Callable[[int], int], emit: Callable[[int], bool]
) -> tuple[int, ...]:
    """Emit the target's tokens along a draft; return the indexes of drafted tokens among them.

    Args:
        draft: Proposed tokens.
        choose: Picks the target's token for a row, given all that was emitted before. Row 0 has
            seen the history, row `i + 1` the path to drafted token `i`, too.
        emit: Takes a token as output; false when it is the last one.
    """
    children = draft.children()
    accepted: list[int] = []
    at: int | None = -1
    goes_on = True
    while at is not None and goes_on:
        token = choose(at + 1)
        goes_on = emit(token)
        at = children.get((at, token))
        if at is not None:
            accepted.append(at)
    return tuple(accepted)


def permitted(draft: Draft, num_permitted: Callable[[Sequence[int]], int]) -> Draft:
    """Return the draft without what cannot be emitted.

    Args:
        draft: Proposed tokens.
        num_permitted: Counts the first of some tokens that could be emitted in turn.
    """
    dropped = set()
    for leaf in draft.leaves():
        path = draft.path(leaf)
        count = num_permitted([draft.token_ids[index] for index in path])
        dropped |= {*path[count:]}
    return draft.without(dropped)
