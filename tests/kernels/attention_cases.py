"""Caches that hold poison where no row may look, the rows that read them, and what they make."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ragflash_kernels.columns import Columns
from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from ragflash_kernels.paged_attention import KvPart, Visibility, attend_parts

SCALE = 0.125
SPARE_PAGES = 3  # entries of a page table that no row needs


@dataclass(frozen=True)
class Rows:
    """Rows of a sequence; `committed` and `pages` are those of its exact part."""

    num_rows: int
    committed: int
    pages: tuple[int, ...]
    packed_pages: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    """Queries and a cache; the plain pages are float64 `[P, Hkv, T, D]`, keys before values."""

    q: torch.Tensor
    exact: KvPart
    packed: KvPart | None
    plain_exact: tuple[torch.Tensor, torch.Tensor]
    plain_packed: tuple[torch.Tensor, torch.Tensor]
    gate: Columns | None
    sequences: list[Rows]

    def run(self, **options):
        options = {"quantized": False, "out_dtype": torch.float32, "gate": self.gate} | options
        return attend_parts(self.q, self.exact, self.packed, scale=SCALE, **options)

    def expected(self, window: int | None = None) -> torch.Tensor:
        """Each row in float64: all packed tokens, and the newest exact ones."""
        out: list[torch.Tensor] = []
        for rows in self.sequences:
            for r in range(rows.num_rows):
                seen = seen_tokens(rows, r, window)
                tokens = [self._tokens(self.plain_exact, rows.pages, seen)]
                if rows.packed_pages:
                    whole = len(rows.packed_pages) * self.exact.keys.shape[2]
                    tokens.append(self._tokens(self.plain_packed, rows.packed_pages, range(whole)))
                k, v = (torch.cat(same, 1) for same in zip(*tokens, strict=True))
                out.append(_mix(self.q[len(out)].double(), k, v))
        mixed = torch.stack(out)
        if self.gate is not None:
            mixed *= self.gate.sum().double().sigmoid()
        return mixed.cpu()

    def alone(self, row: int, sequence: int, place: int) -> "Case":
        """Return a case of one row, which is row `place` of a sequence."""
        rows = self.sequences[sequence]
        lone = [replace(rows, num_rows=1, committed=rows.committed + place)]
        page_tokens = self.exact.keys.shape[2]
        exact = replace(self.exact, visibility=see(lone, page_tokens, self.q.device))
        packed = self.packed and replace(
            self.packed, visibility=see_packed(lone, page_tokens, self.q.device)
        )
        gate = self.gate and Columns(
            self.gate.partials[:, row : row + 1].clone(), self.gate.start, self.gate.width
        )
        return replace(
            self, q=self.q[row : row + 1].clone(), exact=exact, packed=packed, gate=gate,
            sequences=lone,
        )  # fmt: skip

    def _tokens(self, plain, pages, seen: Sequence[int]) -> list[torch.Tensor]:
        own = [pages_of[list(pages)].transpose(0, 1).flatten(1, 2) for pages_of in plain]
        return [tokens[:, list(seen)] for tokens in own]


def seen_tokens(rows, row: int, window: int | None = None) -> list[int]:
    """Which tokens of a sequence one of its rows sees, by going back from parent to parent."""
    path = [row]
    while path[-1] >= 0:
        path.append(path[-1] - 1 if rows.parents is None else rows.parents[path[-1]])
    drafted = [rows.committed + other for other in reversed(path[:-1])]
    seen = [*range(rows.committed), *drafted]
    return seen if window is None else seen[-window:]


def _mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    grouped = q.view(len(k), -1, q.shape[1])
    shares = torch.softmax(grouped @ k.transpose(1, 2) * SCALE, 2)
    return (shares @ v).flatten()


def see(sequences: list[Rows], page_tokens: int, device, window: int | None = None) -> Visibility:
    """What rows see of the exact part, with room for more pages than there are."""
    seen = Visibility.causal(sequences, torch.device(device), window)
    table = torch.nn.functional.pad(seen.page_table, (0, SPARE_PAGES))
    return replace(seen, page_table=table, max_tokens=table.shape[1] * page_tokens)


def see_packed(sequences: list[Rows], page_tokens: int, device) -> Visibility:
    """What rows see of the packed part."""
    whole = [
        replace(rows, committed=len(rows.packed_pages) * page_tokens, pages=rows.packed_pages)
        for rows in sequences
    ]
    return replace(see(whole, page_tokens, device), words=None)


def make_case(
    sequences: list[Rows],
    *,
    heads: tuple[int, int],
    head_dim: int,
    page_tokens: int,
    kv_format: KvFormat | None = None,
    gate_parts: int = 2,
    window: int | None = None,
    split_tokens: int | None = None,
    device: str = "cpu",
) -> Case:
    """`heads`: of keys, and query heads for each; `kv_format`: of the packed part, if any."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).half()

    def pool(lists: list[tuple[int, ...]]) -> torch.Tensor:
        """Pages of two layers; the second is used."""
        pages = 1 + max((page for pages in lists for page in pages), default=0)
        return normal(pages, 2, 2, heads[0], page_tokens, head_dim)

    storage = pool([rows.pages for rows in sequences])
    storage[:, 0] = float("nan")
    for rows in sequences:
        seen = rows.committed + rows.num_rows
        if seen % page_tokens:
            storage[rows.pages[seen // page_tokens], :, :, :, seen % page_tokens :] = float("nan")
    keys, values = storage[:, 1, 0], storage[:, 1, 1]
    visibility = see(sequences, page_tokens, device, window)
    exact = KvPart(keys, values, visibility, split_tokens=split_tokens)
    packed, plain_packed = None, (keys, values)
    if kv_format is not None:
        whole = pool([rows.packed_pages for rows in sequences])[:, 1]
        stored = torch.stack(
            [encode_pages(whole[:, i], kv_format, values=i == 1) for i in (0, 1)], 1
        )
        several = torch.full((len(stored), 2, *stored.shape[1:]), 0xFF, device=device)
        several[:, 1] = stored
        stored = several.to(torch.uint8)[:, 1]
        packed = KvPart(
            stored[:, 0], stored[:, 1], see_packed(sequences, page_tokens, device),
            kv_format, kv_format, split_tokens,
        )  # fmt: skip
        plain_packed = tuple(
            decode_pages(stored[:, i].contiguous(), kv_format, page_tokens=page_tokens,
                         head_dim=head_dim, values=i == 1).double()
            for i in (0, 1)
        )  # fmt: skip
    num_rows, width = sum(rows.num_rows for rows in sequences), heads[0] * heads[1] * head_dim
    gate = Columns(normal(gate_parts, num_rows, width + 32).float(), 16, width)
    return Case(
        normal(num_rows, heads[0] * heads[1], head_dim), exact, packed,
        (keys.double(), values.double()), plain_packed,
        gate if gate_parts else None, sequences,
    )  # fmt: skip
