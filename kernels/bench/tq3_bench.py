"""Attention over TQ3_0 pages alone, without merging of splits, and its launch options."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch
from run import CACHE_BYTES, relative_error, time_us

from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from ragflash_kernels.paged_attention import Visibility
from ragflash_kernels.paged_attention.gluon_tq3 import Tq3Options, attend_tq3

if TYPE_CHECKING:
    from run import Report

KV_HEADS, GROUP, HEAD_DIM, PAGE = 4, 6, 256, 256
SCALE = 1 / 16
SWEEP = {  # tiles of eight queries, registers, keys ahead, by rows
    1: ((1, 80, False), (1, 64, False), (1, 128, True)),
    8: ((3, 128, True), (6, 128, False), (6, 255, False)),
    16: ((4, 128, False), (6, 128, False), (6, 255, True), (12, 255, False)),
    21: ((6, 128, False), (8, 128, False), (8, 255, False)),
}


def bench_tq3(report: "Report", *, sweep: bool) -> None:
    """Time 1 to 21 rows over 32,768 and 131,072 tokens."""
    for tokens in (32768, 131072):
        x = torch.randn(tokens // PAGE, KV_HEADS, PAGE, HEAD_DIM, device="cuda").half()
        keys, values = (encode_pages(x, KvFormat.TQ3_0, values=v) for v in (False, True))
        plain = decode_pages(
            keys, KvFormat.TQ3_0, page_tokens=PAGE, head_dim=HEAD_DIM, rotated=True
        )
        plain = plain.transpose(0, 1).flatten(1, 2)
        copies = CACHE_BYTES // (2 * keys.nbytes) + 1
        pages = [(keys.clone(), values.clone()) for _ in range(copies)]
        for num_rows in SWEEP if sweep else (1, 2, 4, 8, 16, 21):
            for splits in (64, 98, 128) if sweep else (64,):
                for options in _options(num_rows, sweep=sweep):
                    _bench_rows(report, pages, plain, num_rows, splits, options)


def _options(num_rows: int, *, sweep: bool) -> list[Tq3Options]:
    """Return launch options; what is chosen without them comes first."""
    return [Tq3Options(), *(Tq3Options(*one) for one in SWEEP.get(num_rows, ()) if sweep)]


def _bench_rows(
    report: "Report",
    pages: list[tuple[torch.Tensor, torch.Tensor]],
    plain: torch.Tensor,
    num_rows: int,
    splits: int,
    options: Tq3Options,
) -> None:
    num_pages = len(pages[0][0])
    whole = partial(torch.tensor, dtype=torch.int32, device="cuda")
    seen = Visibility(
        torch.arange(num_pages, dtype=torch.int32, device="cuda")[None], whole([0, num_rows]),
        whole([0] * num_rows), whole([num_pages * PAGE]), None, num_rows, num_pages * PAGE,
    )  # fmt: skip
    q = torch.randn(num_rows, KV_HEADS * GROUP, HEAD_DIM, device="cuda") * 0.5
    shape = (num_rows, KV_HEADS * GROUP, splits)
    out = torch.full((*shape, HEAD_DIM), float("nan"), device="cuda")
    lse = torch.full(shape, float("nan"), device="cuda")

    def call(keys: torch.Tensor, values: torch.Tensor) -> None:
        attend_tq3(
            q, keys, values, seen, page_tokens=PAGE, scale=SCALE, split_tokens=128, out=out,
            lse=lse, options=options,
        )  # fmt: skip

    call(*pages[0])
    shares = torch.softmax(lse * 0.6931471805599453, 2)
    error = relative_error(torch.einsum("rhs,rhsd->rhd", shares, out), _exact(q, plain))
    num_bytes = sum(of.nbytes for of in pages[0])
    name = f"tq3_0 {num_pages * PAGE} tokens, {num_rows} rows"
    us = time_us([partial(call, *both) for both in pages])
    report.line(name, us, num_bytes, error, splits=splits, **asdict(options))


def _exact(q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return attention of all rows to all of `[Hkv, S, D]`, keys and values in one."""
    out = []
    for head in range(KV_HEADS * GROUP):
        k = tokens[head // GROUP].double()
        out.append(torch.softmax(q[:, head].double() @ k.T * SCALE, -1) @ k)
    return torch.stack(out, 1)
