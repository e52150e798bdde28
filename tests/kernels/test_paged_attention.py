"""Paged attention against a naive float64 loop; places that no row sees hold NaN."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.paged_attention import paged_attention
from tests.kernels.attention_cases import Rows, seen_tokens

PAGE_TOKENS = 16
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}


def make_case(sequences, *, num_heads=6, num_kv_heads=2, dim=8, num_pages=40, seed=0):
    """q, keys and values as numpy; K and V are NaN wherever no sequence has a token."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((sum(s.num_rows for s in sequences), num_heads, dim))
    keys = np.full((num_pages, num_kv_heads, PAGE_TOKENS, dim), np.nan)
    values = keys.copy()
    for sequence in sequences:
        for position in range(sequence.committed + sequence.num_rows):
            page, place = sequence.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            keys[page, :, place] = rng.standard_normal((num_kv_heads, dim))
            values[page, :, place] = rng.standard_normal((num_kv_heads, dim))
    return q, keys, values


def attend_naively(q, keys, values, sequences, scale, window=None):
    out = np.empty_like(q)
    row = 0
    for sequence in sequences:
        for r in range(sequence.num_rows):
            seen = seen_tokens(sequence, r, window)
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // keys.shape[1])
                places = [(sequence.pages[p // PAGE_TOKENS], p % PAGE_TOKENS) for p in seen]
                k = np.array([keys[page, kv_head, place] for page, place in places])
                v = np.array([values[page, kv_head, place] for page, place in places])
                scores = k @ q[row, head] * scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v / weights.sum()
            row += 1
    return out


def attend(q, keys, values, sequences, *, dtype=torch.float32, scale=0.35, window=None):
    # Keys and values of a layer are strided views of a pool with more layers.
    pool = torch.full((keys.shape[0], 2, 2, *keys.shape[1:]), float("nan"), dtype=dtype)
    pool[:, 1, 0] = torch.from_numpy(keys).to(dtype)
    pool[:, 1, 1] = torch.from_numpy(values).to(dtype)
    return paged_attention(
        torch.from_numpy(q).to(dtype),
        pool[:, 1, 0],
        pool[:, 1, 1],
        sequences=sequences,
        scale=scale,
        window=window,
    )


CASES = {
    "first token": [Rows(1, 0, (0,))],
    "decode in a partial page": [Rows(1, 20, (3, 4))],
    "decode fills a page": [Rows(1, 31, (3, 4))],
    "decode over a long run": [Rows(1, 100, (5, 6, 7, 8, 9, 10, 11))],
    "decode over shuffled pages": [Rows(1, 100, (9, 2, 3, 30, 1, 0, 17))],
    "falling page numbers": [Rows(2, 60, (9, 8, 7, 6))],
    "runs of two": [Rows(1, 95, (4, 5, 20, 21, 8, 9))],
    "draft rows across a page edge": [Rows(5, 30, (12, 11, 13))],
    "prefill of more rows than a block": [Rows(150, 0, (8, 9, 10, 11, 12, 13, 14, 15, 2, 1))],
    "chunk after a chunk": [Rows(70, 77, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9))],
    "spare pages are not read": [Rows(3, 4, (1, 2, 3, 4))],
    "a tree": [Rows(7, 30, (12, 11, 13), parents=(-1, 0, 0, 1, 1, 2, 5))],
    "a tree without a trunk": [Rows(4, 0, (2,), parents=(-1, -1, 0, 1))],
    "a tree between chains": [
        Rows(1, 40, (6, 2, 9)),
        Rows(5, 14, (4, 5), parents=(-1, 0, 0, 2, 1)),
        Rows(3, 15, (1, 0)),
    ],
    "three sequences": [Rows(1, 40, (6, 2, 9)), Rows(20, 0, (4, 5)), Rows(3, 15, (1, 0))],
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sequences", CASES.values(), ids=CASES)
def test_equals_the_naive_loop(sequences, dtype):
    q, keys, values = make_case(sequences)
    exact = attend_naively(q, keys, values, sequences, 0.35)
    result = attend(q, keys, values, sequences, dtype=dtype)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.double().numpy(), exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(1, 1, 1), (4, 4, 5), (7, 1, 32)])
def test_head_shapes(num_heads, num_kv_heads, dim, num_rows):
    sequences = [Rows(num_rows, 37, (2, 3, 0))]
    q, keys, values = make_case(sequences, num_heads=num_heads, num_kv_heads=num_kv_heads, dim=dim)
    exact = attend_naively(q, keys, values, sequences, 0.35)
    result = attend(q, keys, values, sequences).double().numpy()
    np.testing.assert_allclose(result, exact, rtol=0, atol=3e-6)


def hide_what_no_row_sees(keys, values, sequences, window):
    """Make NaN of every token that is too old for all rows of its sequence."""
    for sequence in sequences:
        for position in range(max(0, sequence.committed + 1 - window)):
            page, place = sequence.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            keys[page, :, place] = values[page, :, place] = np.nan


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 64, 1000])
@pytest.mark.parametrize("sequences", CASES.values(), ids=CASES)
def test_a_window_hides_older_tokens(sequences, window):
    q, keys, values = make_case(sequences)
    hide_what_no_row_sees(keys, values, sequences, window)
    exact = attend_naively(q, keys, values, sequences, 0.35, window)
    result = attend(q, keys, values, sequences, window=window).double().numpy()
    np.testing.assert_allclose(result, exact, rtol=0, atol=3e-6)


@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.integers(0, 90), st.sampled_from((0, 1, 3, 90))),
        min_size=1,
        max_size=3,
    ),
    st.none() | st.integers(1, 120),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_any_rows_lengths_and_windows(shapes, window, random):
    numbers = random.sample(range(40), 40)
    sequences = []
    for num_rows, committed, spread in shapes:
        num_pages = -(-(committed + num_rows) // PAGE_TOKENS)
        pages, numbers = numbers[:num_pages], numbers[num_pages:]
        parents = tuple(
            random.randint(max(-1, row - 1 - spread), row - 1) for row in range(num_rows)
        )
        tree = parents if spread else None
        sequences.append(Rows(num_rows, committed, tuple(sorted(pages)), parents=tree))
    q, keys, values = make_case(sequences, num_heads=2, num_kv_heads=1, dim=4)
    if window is not None:
        hide_what_no_row_sees(keys, values, sequences, window)
    exact = attend_naively(q, keys, values, sequences, 0.35, window)
    result = attend(q, keys, values, sequences, window=window).double().numpy()
    np.testing.assert_allclose(result, exact, rtol=0, atol=3e-6)


def test_refuses_a_window_without_a_token():
    q, keys, values = make_case([GOOD])
    with pytest.raises(KernelInputError):
        attend(q, keys, values, [GOOD], window=0)


def test_page_numbers_do_not_matter():
    in_order = [Rows(9, 50, (0, 1, 2, 3))]
    q, keys, values = make_case(in_order)
    shuffled = [Rows(9, 50, (23, 5, 31, 6))]
    moved_keys, moved_values = np.full_like(keys, np.nan), np.full_like(values, np.nan)
    moved_keys[list(shuffled[0].pages)] = keys[:4]
    moved_values[list(shuffled[0].pages)] = values[:4]
    np.testing.assert_allclose(
        attend(q, moved_keys, moved_values, shuffled).numpy(),
        attend(q, keys, values, in_order).numpy(),
        rtol=0,
        atol=1e-6,
    )


def test_large_scores_do_not_overflow():
    sequences = [Rows(2, 20, (0, 1))]
    q, keys, values = make_case(sequences)
    result = attend(q, keys, values, sequences, scale=1e4).double().numpy()
    exact = attend_naively(q, keys, values, sequences, 1e4)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, exact, rtol=0, atol=1e-2)


GOOD = Rows(2, 20, (0, 1))


@pytest.mark.parametrize(
    "rows",
    [
        replace(GOOD, num_rows=3),
        replace(GOOD, num_rows=0),
        replace(GOOD, committed=31),
        replace(GOOD, committed=-1),
        replace(GOOD, pages=(0, 40)),
        replace(GOOD, pages=(0, -1)),
        replace(GOOD, parents=(-1,)),
        replace(GOOD, parents=(-1, 1)),
    ],
)
def test_refuses_rows_that_do_not_fit(rows):
    q, keys, values = make_case([GOOD])
    with pytest.raises(KernelInputError):
        attend(q, keys, values, [rows])


def test_refuses_shapes_and_dtypes_that_do_not_fit():
    q, keys, values = (torch.from_numpy(x) for x in make_case([GOOD]))

    def call(q, keys, values):
        with pytest.raises(KernelInputError):
            paged_attention(q, keys, values, sequences=[GOOD], scale=1.0)

    call(q[:, :5], keys, values)
    call(q[..., :4], keys, values)
    call(q[0], keys, values)
    call(q, keys, values[:3])
    call(q.float(), keys, values)


@pytest.fixture(params=[1, 3])
def num_threads(request):
    """Let torch compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [1, 2, 23, 70])
@pytest.mark.parametrize("window", [None, 40])
def test_where_pages_lie_changes_no_bit(num_rows, window, num_threads):
    """Else a prompt from the cache would not answer as a computed one does."""
    for num_tokens in (16, 100, 128, 333):
        in_a_row = Rows(num_rows, num_tokens, tuple(range(30)))
        q, keys, values = make_case([in_a_row], num_pages=30)
        expected = attend(q, keys, values, [in_a_row], window=window)
        for seed in range(3):
            pages = np.random.default_rng(seed).permutation(30)
            scattered = Rows(num_rows, num_tokens, tuple(np.argsort(pages).tolist()))
            moved = (keys[pages], values[pages])
            assert torch.equal(attend(q, *moved, [scattered], window=window), expected)
