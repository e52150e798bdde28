"""Norms, rotation and writing of pages against their separate steps, interpreted and on a card."""

import dataclasses

import pytest
import torch

from ragflash_kernels.attention_inputs import attention_inputs
from ragflash_kernels.backend import Backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.rms_norm import rms_norm
from ragflash_kernels.rope import rope
from tests.kernels.guarded import GuardedMemory

LARGEST = 65504.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Products with columns of others around them, and a pool with more than one layer."""

    q: Columns
    k: Columns
    v: Columns
    norms: tuple[torch.Tensor | None, torch.Tensor | None]
    angles: tuple[torch.Tensor, torch.Tensor]
    pool: torch.Tensor
    row_pages: torch.Tensor
    row_places: torch.Tensor
    head_dim: int

    def run(self, **options) -> torch.Tensor:
        return attention_inputs(
            self.q, self.k, self.v, head_dim=self.head_dim, q_norm=self.norms[0],
            k_norm=self.norms[1], eps=1e-6, cos=self.angles[0], sin=self.angles[1],
            keys=self.pool[:, 1, 0], values=self.pool[:, 1, 1], row_pages=self.row_pages,
            row_places=self.row_places, **options,
        )  # fmt: skip

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Q, and the pool, by a loop in float64."""
        dim = self.head_dim
        heads = [columns.sum().double().unflatten(1, (columns.width // dim, dim))
                 for columns in (self.q, self.k, self.v)]  # fmt: skip
        for i, norm in enumerate(self.norms):
            if norm is not None:
                heads[i] = rms_norm(heads[i], norm.double(), eps=1e-6)
            heads[i] = rope(heads[i], *self.angles)
        q, k, v = (x.clamp(-LARGEST, LARGEST).half() for x in heads)
        pool = self.pool.clone()
        for row, (page, place) in enumerate(zip(self.row_pages, self.row_places, strict=True)):
            if page >= 0:
                pool[page, 1, 0, :, place] = k[row]
                pool[page, 1, 1, :, place] = v[row]
        return q, pool


def make_case(
    *, rows=3, heads=(4, 2), head_dim=64, half=16, parts=(3, 2), norms=True, page_tokens=8,
    dtype=torch.float32, device="cpu", scale=1.0,
) -> Case:  # fmt: skip
    """`parts`: of the product of Q and K, and of that of V."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q_width, kv_width = (count * head_dim for count in heads)
    joint = Columns.whole((normal(parts[0], rows, 2 * q_width + kv_width) * scale).to(dtype))
    q, _, k = joint.split(q_width, q_width, kv_width)
    v = Columns((normal(parts[1], rows, kv_width + 32) * scale).to(dtype), 16, kv_width)
    weights = (normal(head_dim).abs() + 0.5, normal(head_dim).abs() + 0.5)
    angle = normal(rows, half) * 100
    pool = torch.full((5, 2, 2, heads[1], page_tokens, head_dim), float("nan"), device=device)
    # The second row is padding.
    pages = torch.tensor([[4, -1, 2][row % 3] for row in range(rows)])
    places = torch.tensor([row * 3 % page_tokens for row in range(rows)])
    return Case(
        q, k, v, weights if norms else (None, None), (angle.cos(), angle.sin()), pool.half(),
        pages.int().to(device), places.int().to(device), head_dim,
    )  # fmt: skip


def check(case: Case, backend: Backend, monkeypatch) -> None:
    guard = GuardedMemory()
    q, pool = case.expected()
    placed = dataclasses.replace(case, pool=guard.place(case.pool))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = placed.run(backend=backend)
    guard.check()
    assert found.dtype == torch.float16
    tolerance = {"rtol": 2e-3, "atol": 2e-3}
    assert torch.allclose(found.float(), q.float(), **tolerance)
    assert torch.allclose(placed.pool.float(), pool.float(), **tolerance, equal_nan=True)


BACKENDS = [Backend.REFERENCE, Backend.TRITON]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": (3, 1), "half": 32, "norms": False, "parts": (1, 1)},
        {"heads": (2, 2), "head_dim": 32, "half": 4, "parts": (1, 4)},
        {"dtype": torch.float16, "parts": (1, 1), "rows": 1},
        {"heads": (0, 2)},  # keys and values alone
    ],
)
def test_equals_the_separate_steps(options, backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    check(make_case(**options), backend, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_float16_cannot_hold_becomes_its_largest(backend):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    case = make_case(norms=False, scale=1e6)
    q = case.run(backend=backend)
    stored = case.pool[4, 1, :, :, 0]
    assert q.isfinite().all()
    assert stored.isfinite().all()
    assert q.abs().max() == stored[0].abs().max() == stored[1].abs().max() == LARGEST


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim", "half"), [((24, 4), 256, 32), ((9, 3), 64, 32),
                                                         ((4, 1), 256, 128)])  # fmt: skip
def test_equals_the_separate_steps_on_a_card(heads, head_dim, half, dtype, monkeypatch):
    parts = (7, 2) if dtype is torch.float32 else (1, 1)
    for rows in (1, 16, 21):
        for norms in (True, False):
            case = make_case(
                rows=rows, heads=heads, head_dim=head_dim, half=half, parts=parts, norms=norms,
                page_tokens=256, dtype=dtype, device="cuda",
            )  # fmt: skip
            check(case, Backend.TRITON, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 48}, "heads of 48"),
        ({"pool": torch.zeros(5, 2, 2, 3, 8, 64).half()}, "pages"),
        ({"pool": torch.zeros(5, 2, 2, 2, 8, 64)}, "float32"),
        ({"pool": torch.zeros(5, 2, 2, 2, 64, 8).half().transpose(4, 5)}, "contiguous"),
        ({"angles": (torch.zeros(2, 16), torch.zeros(2, 16))}, "3 rows"),
        ({"angles": (torch.zeros(3, 33), torch.zeros(3, 33))}, "do not fit"),
        ({"norms": (torch.ones(63), None)}, "q_norm"),
        ({"norms": (None, torch.ones(64).half())}, "k_norm"),
        ({"row_pages": torch.zeros(3)}, "row_pages"),
        ({"row_places": torch.zeros(2).int()}, "row_places"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(KernelInputError, match=message):
        dataclasses.replace(make_case(), **changes).run()
