"""Attention over TQ3_0 pages for NVIDIA cards, as far as it can be checked without one."""

import struct

import pytest
import torch

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages, page_layout, rotate
from ragflash_kernels.kv_codec.formats import LEVEL_UNITS, TQ3_LEVELS, rotation_group
from ragflash_kernels.kv_codec.reference import sign_vectors
from ragflash_kernels.paged_attention import Visibility, gluon_ptx
from tests.kernels.guarded import GuardedMemory
from tests.kernels.test_ptx import OPERATIONS, carry_out, halves

pytest.importorskip("triton")

from ragflash_kernels.paged_attention.gluon_tq3 import attend_tq3, pick_tiles
from ragflash_kernels.paged_attention.query_kernel import quantize_queries_kernel

TQ3 = KvFormat.TQ3_0
HEAD_DIM, TOKENS = 256, 64
LEVELS = [*TQ3_LEVELS, *(-level for level in TQ3_LEVELS)]


def page(*, values: bool):
    """Return low words and high words of a page, its scales, and what it decodes to."""
    x = torch.randn(1, 1, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    stored = encode_pages(x, TQ3, values=values)
    layout = page_layout(TQ3, TOKENS, HEAD_DIM)
    parts = (slice(layout.high), slice(layout.high, layout.scales), slice(layout.scales, None))
    low, high, scales = (stored[0, 0, part].clone() for part in parts)
    decoded = decode_pages(
        stored, TQ3, page_tokens=TOKENS, head_dim=HEAD_DIM, values=values, rotated=True
    )
    words = [
        [word & 0xFFFFFFFF for word in plane.view(torch.int32).tolist()] for plane in (low, high)
    ]
    return *words, scales.view(torch.float16), decoded[0, 0]


def multiply_halves(a: int, b: int) -> int:
    products = torch.tensor(halves([a, 0])[:2]) * torch.tensor(halves([b, 0])[:2])
    return int.from_bytes(struct.pack("<2e", *products.tolist()), "little")


@pytest.mark.parametrize("block", range(8))
def test_fragments_of_keys(block):
    low, high, scales, decoded = page(values=False)
    tables = gluon_ptx._key_tables()
    for lane in range(32):
        g, c = divmod(lane, 4)
        rows = (g, g + 8)
        words = [low[t * 16 + c * 4 + block // 2] for t in rows]
        words += [high[t * 8 + c * 2 + block // 4] for t in rows]
        names = [f"${4 + i}" for i in range(6)]
        found = carry_out(
            gluon_ptx.key_fragments(block % 4), dict(zip(names, [*words, *tables], strict=True))
        )
        for i, t in enumerate(rows):
            codes = b"".join(found[f"${i + half}"].to_bytes(4, "little") for half in (0, 2))
            own = torch.tensor(struct.unpack("8b", codes)) / gluon_ptx.KEY_UNIT
            expected = decoded[t, 32 * block + 8 * c :][:8]
            assert torch.allclose(own * float(scales[t * 8 + block]), expected, rtol=3e-3)


@pytest.mark.parametrize("tile", range(4))
def test_fragments_of_values(tile, monkeypatch):
    monkeypatch.setitem(OPERATIONS, "mul.rn.f16x2", multiply_halves)
    low, high, scales, decoded = page(values=True)
    tables = [*gluon_ptx._value_tables(0), *gluon_ptx._value_tables(1)]
    pairs = scales.view(torch.int32).tolist()
    for block in (0, 5):
        for lane in range(32):
            g, c = divmod(lane, 4)
            word = (block * 32 + lane) * 4 + tile
            at = ((block * 4 + c) * 4 + tile) * 2
            own = [low[word], high[word // 2], *(pair & 0xFFFFFFFF for pair in pairs[at : at + 2])]
            names = [f"${8 + i}" for i in range(8)]
            found = carry_out(
                gluon_ptx.value_fragments(tile % 2), dict(zip(names, [*own, *tables], strict=True))
            )
            for m in range(2):
                fragment = [found[f"${4 * m + i}"] for i in range(4)]
                for i, word in enumerate(fragment):
                    d = 32 * block + 16 * m + g + 8 * (i % 2)
                    t = 16 * tile + 2 * c + 8 * (i // 2)
                    expected = decoded[[t, t + 1], d]
                    assert torch.allclose(torch.tensor(halves([word, 0])[:2]), expected, rtol=2e-3)


def test_levels_of_keys_are_those_of_the_format():
    for level, exact in zip(gluon_ptx.KEY_LEVELS, TQ3_LEVELS, strict=True):
        assert level / gluon_ptx.KEY_UNIT == pytest.approx(exact / LEVEL_UNITS, rel=2.6e-3)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_queries_are_quantized_as_fragments(head_dim, rotated):
    heads, group = 2, 3
    guard = GuardedMemory()
    q = guard.place(torch.randn(5, heads * group, head_dim))
    q[1, 2] = 0
    first_rows = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    starts = torch.tensor([4, 9, 7, 0, 3], dtype=torch.int32)
    shape = (3, heads, 2)
    q8 = guard.empty(*shape, 8 * head_dim, dtype=torch.int8)
    scales, bounds = guard.empty(*shape, 8), guard.empty(*shape, 2, dtype=torch.int32)
    width = rotation_group(head_dim)
    quantize_queries_kernel[16, heads, 3](
        q, first_rows, starts, *sign_vectors(width, q.device), q8, scales, bounds, 0.5,
        width**-0.5, heads, group, 2, DIM=head_dim, ROTATE=rotated, EAGER=False,
    )  # fmt: skip
    guard.check()
    expected = rotate(q) if rotated else q
    for sequence, head, m in ((0, 0, 2), (0, 1, 5), (2, 1, 8), (0, 0, 5), (2, 0, 0)):
        row, own = first_rows[sequence] + m // group, head * group + m % group
        stored = q8[sequence, head, m // 8].view(head_dim // 64, 8, 4, 2, 8)[:, m % 8]
        codes = stored.transpose(1, 2).flatten().float()  # pair of blocks, block, c, eight values
        scale = scales[sequence, head, m // 8, m % 8] / 0.5
        assert torch.allclose(codes * scale, expected[row, own], atol=float(scale) * 0.51)
    assert not q8[0, 0, 1].any()
    assert bounds[0, 0].tolist() == [[4, 9], [2**31 - 1, 0]]
    assert bounds[2, 1].tolist() == [[0, 7], [3, 3]]


def test_as_many_tiles_as_pay():
    taken = {rows: pick_tiles(-(-rows * 6 // 8)) for rows in (1, 2, 4, 8, 16, 21, 32)}
    assert taken == {1: 1, 2: 2, 4: 3, 8: 6, 16: 12, 21: 8, 32: 12}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_tokens": 64}, "pages of 64"),
        ({"split_tokens": 96}, "splits of 96"),
        ({"q": torch.zeros(1, 3, 32)}, "q"),
        ({"q": torch.zeros(1, 4, 64)}, "4 query heads"),
        ({"keys": torch.zeros(1, 3, 7167, dtype=torch.uint8)}, "keys"),
        ({"values": torch.zeros(1, 3, 7169, dtype=torch.uint8)[:, :, 1:]}, "values"),
        ({"out": torch.zeros(1, 3, 1, 64)}, "lse"),
        ({"words": torch.zeros(1, dtype=torch.int32)}, "no words"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    whole = torch.zeros(2, dtype=torch.int32)
    seen = Visibility(whole[None], whole, whole, whole[:1], changes.pop("words", None), 1, 512)
    pages = torch.zeros(1, 3, 7168, dtype=torch.uint8)
    options = {
        "q": torch.zeros(1, 3, 64), "keys": pages, "values": pages, "page_tokens": 256,
        "split_tokens": 256, "out": torch.zeros(1, 3, 2, 64), "lse": torch.zeros(1, 3, 2),
    } | changes  # fmt: skip
    with pytest.raises(KernelInputError, match=message):
        attend_tq3(visibility=seen, scale=0.1, **options)
