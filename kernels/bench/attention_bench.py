"""Attention over long contexts with the heads of a 27B hybrid, and encoding of pages."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from run import CACHE_BYTES, relative_error, time_us

from ragflash_kernels.attention_inputs import attention_inputs
from ragflash_kernels.columns import Columns
from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from ragflash_kernels.paged_attention import KvPart, Visibility, attend_parts
from ragflash_kernels.paged_attention.launch import attend, merge_parts, rotate_queries
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from ragflash_kernels.sample import largest

if TYPE_CHECKING:
    from run import Report

KV_HEADS, GROUP, HEAD_DIM, PAGE = 4, 6, 256, 256
HEADS = KV_HEADS * GROUP
EXACT_TOKENS = 4352  # beside packed pages
ROWS = (1, 16, 21)
SPLITS = {4096: (128, 256, 512), 131072: (1024, 2048, 4096)}  # of so many tokens, to sweep


@dataclass(frozen=True)
class Layer:
    """Pages of one layer, keys and values of each part."""

    exact: tuple[torch.Tensor, torch.Tensor]
    packed: tuple[torch.Tensor, torch.Tensor] | None
    kv_format: KvFormat

    @classmethod
    def normal(cls, tokens: int, kv_format: KvFormat) -> "Layer":
        """Random tokens in a format, with exact ones beside them unless all are."""

        def pages(count: int) -> torch.Tensor:
            return torch.randn(count, KV_HEADS, PAGE, HEAD_DIM, device="cuda").half()

        keys = pages(tokens // PAGE)
        if kv_format is KvFormat.F16:
            return cls((keys, keys.clone()), None, kv_format)
        exact = pages(EXACT_TOKENS // PAGE)
        packed = (encode_pages(keys, kv_format), encode_pages(keys, kv_format, values=True))
        return cls((exact, exact.clone()), packed, kv_format)

    def clone(self) -> "Layer":
        """Copy all pages."""
        exact = (self.exact[0].clone(), self.exact[1].clone())
        packed = self.packed and (self.packed[0].clone(), self.packed[1].clone())
        return Layer(exact, packed, self.kv_format)

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(pages.nbytes for pages in (*self.exact, *(self.packed or ())))

    def parts(self, num_rows: int, split: int | None) -> tuple[KvPart, KvPart | None]:
        """As a step of `num_rows` rows sees them; `split` is of the long part."""
        seen = _see(len(self.exact[0]), num_rows, new_rows=num_rows)
        if self.packed is None:
            return KvPart(*self.exact, seen, split_tokens=split), None
        return KvPart(*self.exact, seen), KvPart(
            *self.packed, _see(len(self.packed[0]), num_rows, new_rows=0), self.kv_format,
            self.kv_format, split,
        )  # fmt: skip

    def plain(self) -> torch.Tensor:
        """All keys, which are the values too, float64 `[Hkv, S, D]`."""
        found = [self.exact[0]]
        if self.packed is not None:
            found.append(
                decode_pages(self.packed[0], self.kv_format, page_tokens=PAGE, head_dim=HEAD_DIM)
            )
        return torch.cat([x.double() for x in found]).transpose(0, 1).flatten(1, 2)


def _see(num_pages: int, num_rows: int, *, new_rows: int) -> Visibility:
    whole = partial(torch.tensor, dtype=torch.int32, device="cuda")
    return Visibility(
        torch.arange(num_pages, dtype=torch.int32, device="cuda")[None],
        whole([0, num_rows]),
        whole([0] * num_rows),
        whole([num_pages * PAGE - new_rows]),
        whole([-1] * num_rows) if new_rows else None,
        num_rows,
        num_pages * PAGE,
    )


def bench_attention_parts(report: "Report", *, sweep: bool) -> None:
    """Time attention as a step runs it, rotations, merging, gate and grid included."""
    _bench_small(report)
    for tokens, splits in SPLITS.items():
        for kv_format in (KvFormat.F16, KvFormat.TQ3_0):
            layer = Layer.normal(tokens, kv_format)
            layers = [layer, *(layer.clone() for _ in range(CACHE_BYTES // layer.nbytes))]
            plain = layer.plain()
            for num_rows in ROWS:
                for split in splits if sweep else (None,):
                    _bench_rows(report, layers, plain, num_rows, split)


def _bench_rows(
    report: "Report", layers: list[Layer], plain: torch.Tensor, num_rows: int, split: int | None
) -> None:
    q = torch.randn(num_rows, HEADS, HEAD_DIM, device="cuda").half()
    gate = Columns.whole(torch.randn(3, num_rows, HEADS * HEAD_DIM, device="cuda"))
    call = partial(attend_parts, q, scale=1 / 16, gate=gate)
    parts = [layer.parts(num_rows, split) for layer in layers]
    expected = _exact(q, plain) * gate.sum().sigmoid()
    error = relative_error(call(*parts[0], quantized=False, out_dtype=torch.float32), expected)
    name = f"{layers[0].kv_format} {layers[0].nbytes >> 20} MB, {num_rows} rows"
    for eager in (False, True):
        us = time_us([partial(call, *both, quantized=True, eager=eager) for both in parts])
        report.line(name, us, layers[0].nbytes, error, split=split, eager=eager)


def _exact(q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return attention of all rows to all of `[Hkv, S, D]`."""
    out = []
    for head in range(HEADS):
        k = tokens[head // GROUP]
        out.append(torch.softmax(q[:, head].double() @ k.T / 16, -1) @ k)
    return torch.stack(out, 1).flatten(1)


def _bench_small(report: "Report") -> None:
    """Time the kernels around attention alone; their data stay in the cache, as in a step."""
    for num_rows in ROWS:
        _bench_inputs(report, num_rows)
        q = torch.randn(num_rows, HEADS, HEAD_DIM, device="cuda").half()
        for eager in (False, True):
            us = time_us([partial(rotate_queries, q, eager=eager)] * 8)
            report.line(f"rotate queries, {num_rows} rows", us, 3 * q.nbytes, 0, eager=eager)
        _bench_exact(report, num_rows)
        for splits in (64, 512):
            _bench_merge(report, num_rows, splits)
        logits = torch.randn(num_rows, 248320, device="cuda")
        wrong = float((largest(logits, 248077) != logits[:, :248077].argmax(1)).sum())
        for eager in (False, True):
            us = time_us([partial(largest, logits, 248077, eager=eager)] * 8)
            report.line(f"largest, {num_rows} rows", us, logits.nbytes, wrong, eager=eager)


def _bench_inputs(report: "Report", num_rows: int) -> None:
    product = torch.randn(7, num_rows, (2 * HEADS + KV_HEADS) * HEAD_DIM, device="cuda")
    q, _, k = Columns.whole(product).split(HEADS * HEAD_DIM, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    v = Columns.whole(torch.randn(7, num_rows, KV_HEADS * HEAD_DIM, device="cuda"))
    pool = torch.empty(2, 2, KV_HEADS, PAGE, HEAD_DIM, dtype=torch.float16, device="cuda")
    angles = torch.randn(num_rows, HEAD_DIM // 8, device="cuda")
    weight = torch.rand(HEAD_DIM, device="cuda")
    places = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    call = partial(
        attention_inputs, q, k, v, head_dim=HEAD_DIM, q_norm=weight, k_norm=weight, eps=1e-6,
        cos=angles.cos(), sin=angles.sin(), keys=pool[:, 0], values=pool[:, 1],
        row_pages=torch.zeros_like(places), row_places=places,
    )  # fmt: skip
    num_bytes = 7 * num_rows * 4 * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for eager in (False, True):
        us = time_us([partial(call, eager=eager)] * 8)
        report.line(f"attention inputs, {num_rows} rows", us, num_bytes, 0, eager=eager)


def _bench_exact(report: "Report", num_rows: int) -> None:
    q = torch.randn(num_rows, HEADS, HEAD_DIM, device="cuda").half()
    pools = torch.randn(6, 2, EXACT_TOKENS // PAGE, KV_HEADS, PAGE, HEAD_DIM, device="cuda").half()
    seen = _see(EXACT_TOKENS // PAGE, num_rows, new_rows=num_rows)
    parts = [KvPart(*pool, seen) for pool in pools]
    for eager in (False, True):
        us = time_us(
            [
                partial(attend, q, part, page_tokens=PAGE, scale=1 / 16, eager=eager)
                for part in parts
            ]
        )
        report.line(f"exact pages, {num_rows} rows", us, pools[0].nbytes, 0, eager=eager)


def _bench_merge(report: "Report", num_rows: int, splits: int) -> None:
    exact, packed = (
        (
            torch.randn(num_rows, HEADS, count, HEAD_DIM, device="cuda"),
            torch.randn(num_rows, HEADS, count, device="cuda"),
        )
        for count in (EXACT_TOKENS // PAGE, splits)
    )
    gate = Columns.whole(torch.randn(7, num_rows, HEADS * HEAD_DIM, device="cuda"))
    out = ActivationBuffers.allocate(num_rows, HEADS * HEAD_DIM, torch.device("cuda"))
    num_bytes = exact[0].nbytes + packed[0].nbytes
    for eager in (False, True):
        us = time_us(
            [partial(merge_parts, *exact, packed, gate=gate, out=out, rotated=True, eager=eager)]
            * 8
        )
        report.line(
            f"merge {EXACT_TOKENS // PAGE} + {splits}, {num_rows} rows",
            us,
            num_bytes,
            0,
            eager=eager,
        )


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
