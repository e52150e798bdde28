"""Pages that hold poison where no row may look, and the rows that read them."""

from dataclasses import dataclass

import torch

from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from ragflash_kernels.paged_attention import paged_attention


@dataclass(frozen=True)
class Rows:
    num_rows: int
    committed: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Queries, pages as stored, and pages as the reference reads them."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    plain_keys: torch.Tensor
    plain_values: torch.Tensor
    sequences: list[Rows]
    page_tokens: int

    def expected(self, scale: float, window: int | None = None) -> torch.Tensor:
        return paged_attention(
            self.q.double().cpu(), self.plain_keys.double().cpu(), self.plain_values.double().cpu(),
            sequences=self.sequences, scale=scale, window=window,
        )  # fmt: skip


def make_case(
    sequences: list[Rows],
    *,
    heads: tuple[int, int],
    head_dim: int,
    page_tokens: int,
    formats: tuple[KvFormat, KvFormat],
    device: str = "cpu",
) -> Case:
    """`heads`: of keys, and query heads for each of them."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).half()

    num_pages = 1 + max(page for rows in sequences for page in rows.pages)
    shape = (num_pages, heads[0], page_tokens, head_dim)
    stored, plain = [], []
    for part, kv_format in enumerate(formats):
        pages = normal(*shape)
        if kv_format is KvFormat.F16:
            for rows in sequences:  # tokens that nobody sees
                seen = rows.committed + rows.num_rows
                if seen % page_tokens:
                    pages[rows.pages[seen // page_tokens], :, seen % page_tokens :] = float("nan")
            stored.append(pages)
            plain.append(pages)
            continue
        stored.append(encode_pages(pages, kv_format, values=part == 1))
        decoded = decode_pages(
            stored[-1], kv_format, page_tokens=page_tokens, head_dim=head_dim, values=part == 1
        )
        plain.append(decoded)
    num_rows = sum(rows.num_rows for rows in sequences)
    q = normal(num_rows, heads[0] * heads[1], head_dim).float()
    return Case(q, *stored, *plain, sequences, page_tokens)
