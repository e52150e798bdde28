"""A chunk of rows with its history in pages that hold poison where no row may look."""

import itertools
from dataclasses import dataclass

import torch

from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from ragflash_kernels.paged_attention import paged_attention
from ragflash_kernels.prefill_attention import (
    PackedHistory,
    PrefillBackend,
    PrefillWorkspace,
    prefill_attention,
)
from tests.kernels.attention_cases import Rows

SPARE_PAGES = 3


@dataclass(frozen=True)
class PrefillCase:
    """Queries, pages as stored, and all tokens as float32 `[Hkv, tokens, D]`."""

    q: torch.Tensor
    exact_keys: torch.Tensor
    exact_values: torch.Tensor
    exact_pages: torch.Tensor
    exact_before: int
    packed: PackedHistory | None
    plain_keys: torch.Tensor
    plain_values: torch.Tensor

    def run(
        self,
        backend: PrefillBackend,
        *,
        scale: float,
        window: int | None = None,
        segment_tokens: int = 16384,
        **options,
    ) -> torch.Tensor:
        num_rows, num_heads, head_dim = self.q.shape
        _, num_kv_heads, page_tokens, _ = self.exact_keys.shape
        workspace = PrefillWorkspace(
            max_rows=num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            device=self.q.device, page_tokens=page_tokens, segment_tokens=segment_tokens,
        )  # fmt: skip
        return prefill_attention(
            self.q, self.exact_keys, self.exact_values, self.exact_pages, self.exact_before,
            self.packed, scale=scale, window=window, workspace=workspace, backend=backend,
            **options,
        )  # fmt: skip

    def expected(self, scale: float, window: int | None = None) -> torch.Tensor:
        """What `paged_attention` says of the decoded tokens in one page."""
        rows = Rows(len(self.q), self.plain_keys.shape[1] - len(self.q), (0,))
        return paged_attention(
            self.q.float(), self.plain_keys[None], self.plain_values[None], sequences=[rows],
            scale=scale, window=window,
        )  # fmt: skip


def make_case(
    num_rows: int,
    exact_before: int,
    packed_pages: int = 0,
    *,
    heads: tuple[int, int],
    head_dim: int,
    page_tokens: int,
    formats: tuple[KvFormat, KvFormat] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PrefillCase:
    """`heads`: of queries and of keys; pages are scattered, those of a layer lie apart."""
    generator = torch.Generator(device).manual_seed(0)
    num_heads, num_kv_heads = heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).half()

    def scattered(count: int) -> torch.Tensor:
        pages = torch.randperm(count + SPARE_PAGES, generator=generator, device=device)
        return pages[:count].int()

    seen = exact_before + num_rows
    exact_pages = scattered(-(-seen // page_tokens))
    num_pages = len(exact_pages)
    pool = torch.full(
        (num_pages + SPARE_PAGES, 2, 2, num_kv_heads, page_tokens, head_dim), float("nan"),
        dtype=torch.float16, device=device,
    )  # fmt: skip
    plain: list[list[torch.Tensor]] = [[], []]
    stored = []
    if formats is not None:
        listed = scattered(packed_pages)
        for part, kv_format in enumerate(formats):
            shape = (packed_pages + SPARE_PAGES, num_kv_heads, page_tokens, head_dim)
            pages, tokens = _packed(normal(*shape), kv_format, listed, values=part == 1)
            stored.append(pages)
            plain[part].append(tokens)
    for part in (0, 1):
        tokens = normal(num_kv_heads, num_pages * page_tokens, head_dim)
        plain[part].append(tokens[:, :seen].float())
        tokens[:, seen:] = float("nan")
        pages = tokens.view(num_kv_heads, num_pages, page_tokens, head_dim)
        pool[exact_pages.long(), 1, part] = pages.transpose(0, 1)
    packed = None if formats is None else PackedHistory(*stored, listed, *formats)
    projected = normal(num_rows, num_heads + 1, head_dim).to(dtype)  # other columns beside them
    return PrefillCase(
        projected[:, :num_heads], pool[:, 1, 0], pool[:, 1, 1], exact_pages, exact_before, packed,
        *(torch.cat(parts, 1) for parts in plain),
    )  # fmt: skip


def _packed(
    x: torch.Tensor, kv_format: KvFormat, listed: torch.Tensor, *, values: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return encoded pages that lie apart, and what tokens of the listed ones stand for."""
    pages = encode_pages(x, kv_format, values=values)
    apart = torch.full((len(pages), 2, *pages.shape[1:]), 255, dtype=torch.uint8, device=x.device)
    apart[:, 1] = pages
    decoded = decode_pages(
        pages, kv_format, page_tokens=x.shape[2], head_dim=x.shape[3], values=values
    )
    return apart[:, 1], decoded[listed.long()].transpose(0, 1).flatten(1, 2)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


ODD_LENGTHS = tuple(itertools.product((33, 100, 1000, 2048), (0, 255, 256, 3000)))
