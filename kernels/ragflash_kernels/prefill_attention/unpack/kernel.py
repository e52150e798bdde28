"""Plain Triton: listed pages become float16 tokens side by side; values stay rotated.

The first arguments of all kernels are alike. `pages` are bytes, pages `page_stride` bytes apart, a
head's page takes SIZE of them; `page_list` has page numbers; a head's tokens `[…, DIM]` in `out`
begin `head_stride` values after those of the head before. How a page is laid out is said in
`kv_codec/formats.py`. PTX: on an NVIDIA card, not interpreted.
"""

import triton
import triton.language as tl

from ragflash_kernels.kv_codec.formats import LEVEL_UNITS, TQ3_LEVELS
from ragflash_kernels.paged_attention.quarters import load_quarter
from ragflash_kernels.prefill_attention.unpack import ptx

_TQ3 = tl.constexpr(tuple(level / LEVEL_UNITS for level in TQ3_LEVELS))
_GROUP_PTX = tl.constexpr(ptx.tq3_group())
_GROUP_CONSTRAINTS = tl.constexpr(ptx.GROUP_CONSTRAINTS)


@triton.jit
def _find(pages, page_list, out, page_stride, head_stride, first, SIZE: tl.constexpr,
          DIM: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Return where the page of a listed token is, and where the token goes."""
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(page_list + first // PAGE).to(tl.int64)
    target = out + head * head_stride + first.to(tl.int64) * DIM
    return pages + page * page_stride + head * SIZE, target


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["page_list"])
def copy_kernel(
    pages, page_list, out, page_stride, head_stride, num_tokens, SIZE: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Copy T float16 tokens; zeros take the place of those after the first `num_tokens`."""
    first = tl.program_id(0) * T
    place, target = _find(
        pages, page_list, out, page_stride, head_stride, first, SIZE, DIM, PAGE
    )  # fmt: skip
    t = tl.arange(0, T)[:, None]
    d = tl.arange(0, DIM)[None, :]
    halves = place.to(tl.pointer_type(tl.float16)) + (first % PAGE) * DIM
    values = tl.load(halves + t * DIM + d, mask=first + t < num_tokens, other=0.0)
    tl.store(target + t * DIM + d, values)


@triton.jit(do_not_specialize_on_alignment=["page_list"])
def unpack_kernel(
    pages, page_list, out, page_stride, head_stride, SIZE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, FORMAT: tl.constexpr, T: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Unpack T tokens of a format that does not tell keys from values."""
    first = tl.program_id(0) * T
    place, target = _find(
        pages, page_list, out, page_stride, head_stride, first, SIZE, DIM, PAGE
    )  # fmt: skip
    t = tl.arange(0, T)
    width: tl.constexpr = DIM // 4
    to = target + t[:, None] * DIM + tl.arange(0, width)[None, :]
    for quarter in tl.static_range(4):
        values = load_quarter(
            place, first % PAGE + t, quarter, t < T, T, DIM, PAGE, FORMAT, False, PTX
        )  # fmt: skip
        tl.store(to + quarter * width, values)


@triton.jit
def _load_groups(low, high, first, W: tl.constexpr):
    """Return int32 `[W, 2]`: codes of the groups of W words from word `first` on, as nibbles."""
    w = first + tl.arange(0, W)
    levels = tl.load(low.to(tl.pointer_type(tl.int32)) + w)
    signs = tl.load(high.to(tl.pointer_type(tl.int32)) + w // 2) >> (w % 2 * 2)
    even = (levels & 0x33333333) | ((signs & 0x11111111) << 2)
    odd = ((levels >> 2) & 0x33333333) | (((signs >> 1) & 0x11111111) << 2)
    return tl.join(even, odd)


@triton.jit
def _half(word, which: tl.constexpr):
    """Return float16: the lower (0) or upper (1) half of int32."""
    return (word >> (16 * which)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _scaled_level(code, scale):
    level = tl.full(code.shape, _TQ3[0], tl.float16)
    for i in tl.static_range(1, 4):
        level = tl.where(code & 3 == i, tl.full(code.shape, _TQ3[i], tl.float16), level)
    scaled = tl.where(code & 4 == 4, -level, level) * scale
    return scaled.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _scaled_levels(codes, scales, first: tl.constexpr):
    """Return int32: values `first` and `first + 1` of groups, times the halves of `scales`."""
    lower = _scaled_level((codes >> (4 * first)) & 7, _half(scales, 0))
    upper = _scaled_level((codes >> (4 * first + 4)) & 7, _half(scales, 1))
    return lower | (upper << 16)


@triton.jit
def _look_up(codes, even, odd, PTX: tl.constexpr):
    """Return int32 `[W, 2, 2, 2]`: words of two values of a group, in order; see `tq3_group`."""
    if PTX:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            _GROUP_PTX, _GROUP_CONSTRAINTS, [codes, even, odd],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x0, x1 = _scaled_levels(codes, even, 0), _scaled_levels(codes, odd, 2)
        x2, x3 = _scaled_levels(codes, even, 4), _scaled_levels(codes, odd, 6)
    return tl.join(tl.join(x0, x2), tl.join(x1, x3))


@triton.jit(do_not_specialize_on_alignment=["page_list"])
def unpack_tq3_keys_kernel(
    pages, page_list, out, page_stride, head_stride, SIZE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, T: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Unpack T keys of TQ3_0."""
    first = tl.program_id(0) * T
    place, target = _find(
        pages, page_list, out, page_stride, head_stride, first, SIZE, DIM, PAGE
    )  # fmt: skip
    first %= PAGE
    words: tl.constexpr = T * DIM // 16
    blocks: tl.constexpr = DIM // 32
    codes = _load_groups(place, place + PAGE * DIM // 4, first * (DIM // 16), words)
    group = tl.arange(0, words)[:, None] * 2 + tl.arange(0, 2)[None, :]
    token = group // (4 * blocks)
    block = group % blocks
    scales = (place + PAGE * DIM * 3 // 8).to(tl.pointer_type(tl.int16))
    scale = tl.load(scales + (first + token) * blocks + block)
    twice = (scale.to(tl.int32) & 0xFFFF) * 0x10001
    values = tl.reshape(_look_up(codes, twice, twice, PTX), (words, 2, 4))
    at = (token * DIM + 32 * block + group // blocks % 4 * 8) // 2
    pairs = target.to(tl.pointer_type(tl.int32))
    tl.store(pairs + at[:, :, None] + tl.arange(0, 4)[None, None, :], values)


@triton.jit(do_not_specialize_on_alignment=["page_list"])
def unpack_tq3_values_kernel(
    pages, page_list, out, page_stride, head_stride, SIZE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, TILES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Unpack 64 channels of 16 TILES values of TQ3_0."""
    first = tl.program_id(0) * (16 * TILES)
    place, target = _find(
        pages, page_list, out, page_stride, head_stride, first, SIZE, DIM, PAGE
    )  # fmt: skip
    words: tl.constexpr = 64 * TILES  # of two blocks, 8 g, 4 c, TILES
    block = first % PAGE // (16 * TILES) * (DIM // 32) + tl.program_id(2) * 2
    codes = _load_groups(place, place + PAGE * DIM // 4, block * (words // 2), words)
    w = tl.arange(0, words)[:, None]
    four = (block + w // (words // 2)) * (4 * TILES) + w % (4 * TILES)  # scales of four tokens
    scales = (place + PAGE * DIM * 3 // 8).to(tl.pointer_type(tl.int32)) + four * 2
    even = tl.broadcast_to(tl.load(scales), (words, 2))
    odd = tl.broadcast_to(tl.load(scales + 1), (words, 2))
    pairs = _look_up(codes, even, odd, PTX)
    values = tl.join(_half(pairs, 0), _half(pairs, 1))
    # Blocks, g, c, tiles, m, halves of 16 values, pairs of tokens, tokens.
    values = tl.reshape(values, (2, 8, 4, TILES, 2, 2, 2, 2))
    values = tl.reshape(tl.permute(values, (3, 6, 2, 7, 0, 4, 5, 1)), (16 * TILES, 64))
    t = tl.arange(0, 16 * TILES)[:, None]
    d = tl.program_id(2) * 64 + tl.arange(0, 64)[None, :]
    tl.store(target + t * DIM + d, values)
