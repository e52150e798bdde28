"""Trees of drafts that know the answer in part, and are wrong in every way they can be."""

import random
from collections.abc import Callable, Sequence

from ragflash.speculative.drafter import Draft

Following = Callable[[Sequence[int]], Sequence[int]]  # the next tokens of a plain run


def wild_tree(
    following: Following, vocab_size: int, seed: int = 0, *, repeats: bool = True
) -> Callable[[Sequence[int], int], Draft]:
    """Propose random trees, some over budget, with tokens that are no token, and twins.

    A child of a right token is right in three of four cases, so that walks go deep by winding ways.
    `repeats` lets siblings be the same token.
    """

    def propose(history: Sequence[int], budget: int) -> Draft:
        rng = random.Random(f"{seed}{len(history)}")
        right = following(history)
        token_ids: list[int] = []
        parents: list[int] = []
        depths = {-1: -1}
        on_path = {-1}
        for index in range(budget + rng.choice((0, 0, 3)) - rng.choice((0, 0, budget // 2))):
            parent = rng.choice((index - 1, index - 1, rng.randrange(-1, index), max(on_path)))
            depth = depths[index] = depths[parent] + 1
            is_right = parent in on_path and depth < len(right) and rng.random() < 0.75
            token = right[depth] if is_right else rng.randrange(-1, vocab_size + 1)
            taken = {token_ids[at] for at in range(index) if parents[at] == parent}
            if is_right and token not in taken:
                on_path.add(index)
            elif not repeats:
                token = next(t for t in range(vocab_size) if t not in taken)
            token_ids.append(token)
            parents.append(parent)
        return Draft(tuple(token_ids), "wild", tuple(parents))

    return propose


def answer_of(token_ids: Sequence[int], num_prompt: int) -> Following:
    """What follows in an answer that is known."""
    return lambda history: token_ids[len(history) - num_prompt :]
