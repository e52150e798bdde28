"""Attention over TQ3_0 pages on a card, against float64 over what the pages decode to."""

import pytest
import torch

from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from tests.kernels.guarded import GuardedMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TQ3 = KvFormat.TQ3_0
HEADS = {64: (2, 3), 128: (2, 4), 256: (4, 6)}  # of keys, and query heads for each
PAGE = 256
TOLERANCE = 5e-3  # int8 queries and levels of keys; it grows with scores, here of deviation 0.5


class Case:
    """Sequences of `(rows, tokens)` over shuffled pages whose unseen places hold poison."""

    def __init__(self, sequences: list[tuple[int, int]], head_dim: int) -> None:
        from ragflash_kernels.paged_attention import Visibility

        kv_heads, group = HEADS[head_dim]
        torch.manual_seed(0)
        needed = [-(-tokens // PAGE) for _, tokens in sequences]
        order = (torch.randperm(sum(needed)) + 1).split(needed)
        shape = (sum(needed) + 1, kv_heads, PAGE, head_dim)
        self.rows = [rows for rows, _ in sequences]
        self.ends = [tokens for _, tokens in sequences]
        stored, self.plain = [], []
        for values in (False, True):
            x = torch.randn(shape, device="cuda").half()
            for own, end in zip(order, self.ends, strict=True):
                if end % PAGE:  # places that nobody sees
                    x[own[-1], :, end % PAGE :] = float("nan")
            pages = encode_pages(x, TQ3, values=values)
            pages[0] = 0xFF
            apart = torch.full((len(pages), 2, *pages.shape[1:]), 0xFF, device="cuda").byte()
            apart[:, 1] = pages
            stored.append(apart[:, 1])
            plain = decode_pages(
                pages, TQ3, page_tokens=PAGE, head_dim=head_dim, values=values, rotated=True
            )
            self.plain.append([
                plain[own.cuda()].transpose(0, 1).flatten(1, 2).double() for own in order
            ])  # fmt: skip
        self.keys, self.values = stored
        table = torch.zeros(len(sequences), max(needed) + 2, dtype=torch.int32)
        for sequence, own in enumerate(order):
            table[sequence, : len(own)] = own
        first = torch.tensor([0, *self.rows]).cumsum(0).int().cuda()
        count = sum(self.rows)
        self.q = torch.randn(count, kv_heads * group, head_dim, device="cuda") * 0.5
        self.scale = head_dim**-0.5
        self.seen = Visibility(
            table.cuda(), first, torch.zeros(count, dtype=torch.int32, device="cuda"),
            torch.tensor(self.ends, dtype=torch.int32, device="cuda"), None, max(self.rows),
            max(needed) * PAGE + 300,
        )  # fmt: skip

    def run(self, splits: int = 7, split: int = 128, **options):
        """Return partial means and logarithms."""
        from ragflash_kernels.paged_attention.gluon_tq3 import attend_tq3

        q = self.q
        out = torch.empty((*q.shape[:2], splits, q.shape[2]), device="cuda")
        lse = torch.empty((*q.shape[:2], splits), device="cuda")
        attend_tq3(
            q, self.keys, self.values, self.seen, page_tokens=PAGE,
            scale=self.scale, split_tokens=split, out=out, lse=lse, **options,
        )  # fmt: skip
        return out, lse

    def expected(self) -> torch.Tensor:
        """Return what rows mix of all tokens from their starts on, float64 `[rows, Hq, D]`."""
        mixed, row = [], 0
        starts = self.seen.starts.tolist()
        for sequence, rows in enumerate(self.rows):
            for _ in range(rows):
                end = self.ends[sequence]
                seen = slice(min(starts[row], end), end)
                group = self.q.shape[1] // self.keys.shape[1]
                k, v = (of[sequence][:, seen].repeat_interleave(group, 0) for of in self.plain)
                scores = torch.einsum("hd,hsd->hs", self.q[row].double(), k) * self.scale
                mixed.append(torch.einsum("hs,hsd->hd", torch.softmax(scores, 1), v))
                row += 1
        return torch.stack(mixed)


def merge(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    shares = torch.softmax(lse.double() * torch.tensor(2.0).log().item(), 2)
    shares = torch.where(lse.isneginf(), 0.0, shares)
    return torch.einsum(
        "rhs,rhsd->rhd", shares, torch.where(shares[..., None] > 0, out, 0).double()
    )


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 4096)],
        [(1, 2501)],
        [(16, 3000)],
        [(21, 1025)],
        [(2, 700), (1, 17), (32, 1111), (4, 0), (8, 256)],
    ],
)
def test_equals_attention_over_decoded_pages(sequences, head_dim, monkeypatch):
    case = Case(sequences, head_dim)
    guard = GuardedMemory()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = [case.run(), case.run(splits=2), case.run(splits=9, split=512)]
    guard.check()
    for out, lse in found:
        assert error(merge(out, lse), case.expected()) < TOLERANCE


def test_the_logarithm_is_of_the_sum_of_weights():
    case = Case([(3, 900)], 128)
    _, lse = case.run()
    k = case.plain[0][0][:, :900].repeat_interleave(4, 0)
    scores = torch.einsum("rhd,hsd->rhs", case.q.double(), k) * case.scale
    total = lse.double().exp2().sum(2).log()
    assert torch.allclose(total, scores.logsumexp(2), atol=2e-2)


@pytest.mark.parametrize("head_dim", HEADS)
def test_starts_hide_older_tokens(head_dim):
    case = Case([(5, 2000), (1, 300)], head_dim)
    case.seen.starts.copy_(torch.tensor([0, 1999, 1100, 130, 1536, 299]))
    out, lse = case.run()
    assert error(merge(out, lse), case.expected()) < TOLERANCE
    assert (lse[1].isfinite().sum(1) == 1).all()  # its one token is in one split


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 6, 8, 12])
def test_a_row_depends_neither_on_others_nor_on_tiles(tiles):
    from ragflash_kernels.paged_attention.gluon_tq3 import Tq3Options

    case = Case([(16, 1500)], 256)
    out, lse = case.run()
    found, logarithms = case.run(options=Tq3Options(tiles=tiles))
    assert torch.equal(logarithms, lse)
    assert torch.equal(found[~lse.isneginf()], out[~lse.isneginf()])
    alone = Case([(1, 1500)], 256)
    for row in (0, 7, 15):
        alone.q = case.q[row : row + 1].contiguous()
        found, logarithms = alone.run()
        assert torch.equal(logarithms[0], lse[row])
        assert torch.equal(found[0][~lse[row].isneginf()], out[row][~lse[row].isneginf()])


def test_scores_that_rise_late_raise_the_reference():
    case = Case([(2, 2048)], 256)
    for row, token in ((0, 1900), (1, 300)):
        head = case.plain[0][0][0, token].float()
        case.q[row, 0] = head / head.norm() * 16
    out, lse = case.run(splits=1)
    assert out[:, 0, 0].isfinite().all()
    assert error(merge(out, lse), case.expected()) < 2 * TOLERANCE


@pytest.mark.parametrize("eager", [False, True])
def test_a_graph_replays_with_other_lengths(eager):
    if eager and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("dependent launches need sm_90")
    case = Case([(2, 1000), (1, 600)], 256)
    case.run(eager=eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.run(eager=eager)
    case.ends = [40, 513]
    case.seen.ends.copy_(torch.tensor(case.ends))
    graph.replay()
    assert error(merge(out, lse), case.expected()) < TOLERANCE
