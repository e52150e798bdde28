"""Attention over long contexts with the heads of a 27B hybrid, and encoding of pages."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from run import CACHE_BYTES, relative_error, time_us

from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from ragflash_kernels.paged_attention.launch import Visibility, paged_attention_triton

if TYPE_CHECKING:
    from run import Report

KV_HEADS, GROUP, HEAD_DIM, PAGE = 4, 6, 256, 256


def bench_attention(report: "Report", *, sweep: bool) -> None:
    """Time attention of 1, 8, 16 and 21 rows, merging of splits and rotations included."""
    for tokens in (32768, 131072):
        x = torch.randn(tokens // PAGE, KV_HEADS, PAGE, HEAD_DIM, device="cuda").half()
        for kv_format in (KvFormat.F16, KvFormat.TQ3_0, KvFormat.Q8_0, KvFormat.TQ4):
            keys, values = (
                x if kv_format is KvFormat.F16 else encode_pages(x, kv_format, values=values)
                for values in (False, True)
            )
            num_bytes = 2 * keys.nbytes
            copies = [(keys.clone(), values.clone()) for _ in range(CACHE_BYTES // num_bytes + 1)]
            for num_rows in (1, 8, 16, 21) if kv_format in ("f16", "tq3_0") else (1,):
                for split in (512, 1024, 2048, 4096) if sweep else (1024, 2048):
                    _bench_rows(report, copies, kv_format, num_rows, split)


def _bench_rows(
    report: "Report",
    copies: list[tuple[torch.Tensor, torch.Tensor]],
    kv_format: KvFormat,
    num_rows: int,
    split: int,
) -> None:
    pages = copies[0][0]
    num_pages = len(pages)
    tokens = num_pages * PAGE
    q = torch.randn(num_rows, KV_HEADS * GROUP, HEAD_DIM, device="cuda")
    seen = Visibility(
        torch.arange(num_pages, dtype=torch.int32, device="cuda")[None],
        torch.tensor([0, num_rows], dtype=torch.int32, device="cuda"),
        torch.zeros(num_rows, dtype=torch.int32, device="cuda"),
        torch.tensor([tokens - num_rows], dtype=torch.int32, device="cuda"),
        torch.full((num_rows,), -1, dtype=torch.int32, device="cuda"),
        num_rows,
        tokens,
    )

    def call(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return paged_attention_triton(
            q, keys, values, seen, page_tokens=PAGE, scale=1 / 16, key_format=kv_format,
            value_format=kv_format, split_tokens=split,
        )  # fmt: skip

    error = relative_error(call(*copies[0]), _exact(q, pages, kv_format))
    us = time_us([partial(call, *pair) for pair in copies])
    num_bytes = 2 * pages.numel() * pages.element_size()
    report.line(f"{kv_format} {tokens} tokens, {num_rows} rows", us, num_bytes, error, split=split)


def _exact(q: torch.Tensor, pages: torch.Tensor, kv_format: KvFormat) -> torch.Tensor:
    if kv_format is KvFormat.F16:
        plain = pages.float()
    else:
        plain = decode_pages(pages, kv_format, page_tokens=PAGE, head_dim=HEAD_DIM)
    tokens = plain.transpose(0, 1).flatten(1, 2)  # [Hkv, S, D]
    out = []
    for head in range(KV_HEADS * GROUP):
        k = tokens[head // GROUP].double()
        out.append(torch.softmax(q[:, head].double() @ k.T / 16, -1) @ k)
    return torch.stack(out, 1)


def bench_codec(report: "Report", *, sweep: bool) -> None:
    """Time encoding: float16 in, packed pages out."""
    x = torch.randn(256, KV_HEADS, PAGE, HEAD_DIM, device="cuda").half()
    for kv_format in KvFormat:
        if kv_format is KvFormat.F16:
            continue
        pages = encode_pages(x, kv_format)
        plain = decode_pages(pages, kv_format, page_tokens=PAGE, head_dim=HEAD_DIM)
        us = time_us([partial(encode_pages, x, kv_format)])
        num_bytes = 2 * x.numel() + pages.numel()
        report.line(f"encode {kv_format}", us, num_bytes, relative_error(plain, x))
