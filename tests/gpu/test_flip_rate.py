"""Drafts hardly ever change what a model says, and never in exact mode.

A text is read twice: token by token as in decoding, and 16 rows at a time as when a draft of 15 is
verified. Both multiply the same numbers and add them in another order, so that the likeliest token
may differ where two are almost equally likely. On positions from 4,096 on, older keys and values
are packed.
"""

import pytest

from tests.gpu.reading import choices, place, read_tokens

ROWS = 16
MOST_FLIPS = 1 / 5000
PIECES, PIECE_TOKENS = 4, 6400  # of each of two models: 51,200 tokens
models = pytest.mark.parametrize("model_path", ["smollm2", "gemma"], indirect=True)


def count_flips(placed, pieces, rows=ROWS) -> int:
    flips = 0
    for tokens in pieces:
        plain, verified = (choices(placed, tokens, at_once) for at_once in (1, rows))
        flips += int((plain != verified).sum())
    return flips


def cut(tokens, length):
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


@models
def test_plain_decoding_and_verification_choose_the_same_tokens(model_path, device, is_small):
    length, count = (48, 2) if is_small else (PIECE_TOKENS, PIECES)
    tokens = read_tokens(model_path, count * length)
    placed = place(model_path, device, context_tokens=length, kv_format="q8_0")
    flips = count_flips(placed, cut(tokens, length))
    print(f"{model_path.name}: {flips} of {len(tokens)} tokens differ")
    assert flips <= max(1, len(tokens) * MOST_FLIPS)


@models
def test_in_exact_mode_not_one_differs(model_path, device, is_small):
    length = 48 if is_small else 2048
    tokens = read_tokens(model_path, length)
    placed = place(model_path, device, context_tokens=length, kv_format="q8_0", exact=True)
    assert count_flips(placed, [tokens]) == 0
