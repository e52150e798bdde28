"""Reading values out of GGML blocks in Triton; the formats are described at the references.

`block` says where each value's block begins, `i` is the value's number in it, and what `mask`
leaves out reads as zero bytes. Products and sums are taken in the references' order: to be compiled
without fused products.
"""

import triton
import triton.language as tl


@triton.jit
def _byte(block, at, mask):
    return tl.load(block + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(block, at, mask):
    place = (block + at).to(tl.pointer_type(tl.float16))
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _signed(block, at, mask):
    return tl.load(block + at, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _field(block, i, mask, START: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr):
    """Return field i of those that `fields.bit_fields` splits bytes from START on into."""
    of_run: tl.constexpr = RUN * (8 // BITS)
    stored = _byte(block, START + i // of_run * RUN + i % RUN, mask)
    return (stored >> (i % of_run // RUN * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _unpack_32(block, i, levels, mask, FORMAT: tl.constexpr):
    """Return values of the formats whose blocks hold 32."""
    d = _half(block, 0, mask)
    if FORMAT == "Q8_0":
        value = _signed(block, 2 + i, mask) * d
    elif FORMAT == "Q4_0":
        value = (_field(block, i, mask, 2, 4, 16) - 8).to(tl.float32) * d
    elif FORMAT == "Q4_1":
        value = _field(block, i, mask, 4, 4, 16).to(tl.float32) * d + _half(block, 2, mask)
    elif FORMAT == "Q5_0":
        q = _field(block, i, mask, 6, 4, 16) + _field(block, i, mask, 2, 1, 1) * 16
        value = (q - 16).to(tl.float32) * d
    elif FORMAT == "Q5_1":
        q = _field(block, i, mask, 8, 4, 16) + _field(block, i, mask, 4, 1, 1) * 16
        value = q.to(tl.float32) * d + _half(block, 2, mask)
    else:
        tl.static_assert(FORMAT == "IQ4_NL")
        level = tl.load(levels + _field(block, i, mask, 2, 4, 16))
        value = level.to(tl.float32) * d
    return value


@triton.jit
def _six_bit(block, j, mask, FIRST: tl.constexpr, SHIFT: tl.constexpr):
    """Return scale (FIRST is 4, SHIFT 0) or minimum (8, 4) j of Q4_K and Q5_K."""
    early = _byte(block, FIRST + j % 4, mask)
    late = (_byte(block, 12 + j % 4, mask) >> SHIFT) & 15
    return tl.where(j < 4, early & 63, late | (early >> 6 << 4)).to(tl.float32)


@triton.jit
def _unpack_256(block, i, levels, mask, FORMAT: tl.constexpr):
    """Return values of the formats whose blocks hold 256."""
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        if FORMAT == "Q4_K":
            q = _field(block, i, mask, 16, 4, 32)
        else:
            q = _field(block, i, mask, 48, 4, 32) + _field(block, i, mask, 16, 1, 32) * 16
        scale = _half(block, 0, mask) * _six_bit(block, i // 32, mask, 4, 0)
        minimum = _half(block, 2, mask) * _six_bit(block, i // 32, mask, 8, 4)
        value = q.to(tl.float32) * scale - minimum
    elif FORMAT == "Q6_K":
        q = _field(block, i, mask, 0, 4, 64) + _field(block, i, mask, 128, 2, 32) * 16
        scale = _half(block, 208, mask) * _signed(block, 192 + i // 16, mask)
        value = (q - 32).to(tl.float32) * scale
    elif FORMAT == "Q2_K":
        both = _byte(block, i // 16, mask)
        scale = _half(block, 80, mask) * (both & 15).to(tl.float32)
        minimum = _half(block, 82, mask) * (both >> 4).to(tl.float32)
        value = _field(block, i, mask, 16, 2, 32).to(tl.float32) * scale - minimum
    elif FORMAT == "Q3_K":
        q = _field(block, i, mask, 32, 2, 32) + _field(block, i, mask, 0, 1, 32) * 4
        s = _field(block, i // 16, mask, 96, 4, 8) + _field(block, i // 16, mask, 104, 2, 4) * 16
        value = (q - 4).to(tl.float32) * (_half(block, 108, mask) * (s - 32).to(tl.float32))
    else:
        tl.static_assert(FORMAT == "IQ4_XS")
        s = _field(block, i // 32, mask, 4, 4, 1) + _field(block, i // 32, mask, 2, 2, 1) * 16
        level = tl.load(levels + _field(block, i, mask, 8, 4, 16)).to(tl.float32)
        value = level * (_half(block, 0, mask) * (s - 32).to(tl.float32))
    return value


@triton.jit
def unpack_values(block, i, levels, mask, FORMAT: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return float32 values; `levels` are those of IQ4, int8; ELEMENTS is of a block."""
    if FORMAT == "F32":
        place = block.to(tl.pointer_type(tl.float32))
        value = tl.load(place, mask=mask, other=0.0)
    elif FORMAT == "F16":
        value = _half(block, 0, mask)
    elif FORMAT == "BF16":
        place = block.to(tl.pointer_type(tl.uint16))
        stored = tl.load(place, mask=mask, other=0).to(tl.int32) << 16
        value = stored.to(tl.float32, bitcast=True)
    elif ELEMENTS == 32:
        value = _unpack_32(block, i, levels, mask, FORMAT)
    else:
        value = _unpack_256(block, i, levels, mask, FORMAT)
    return value
