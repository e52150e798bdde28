"""What a warp loads of a record and of activations, in Gluon: a tensor has one element a thread."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ragflash_kernels.qmatmul import ptx
from ragflash_kernels.qmatmul.formats import RECORD_FORMATS, Scales

_FLOAT16 = gl.constexpr(int(Scales.FLOAT16))
_BYTES = gl.constexpr(int(Scales.BYTES))
_OF_16 = gl.constexpr(int(Scales.SIGNED_BYTES_OF_16))

# What the compiler finds in a function that it calls must be data: hence tables, not functions.
_LOADS = {
    (kind, count, width): (
        ptx.load(kind, count, width, 512),
        ptx.load_constraints(kind, count, width),
    )
    for kind in ptx.KINDS_OF_LOADS
    for count in (1, 2)
    for width in (2, 4)
}
_RECORD_BYTES = sorted(
    {
        layout.offsets(steps).size
        for layout in RECORD_FORMATS.values()
        for steps in (2, 4, 8)
        if steps <= layout.max_steps
    }
)
_COPIES = {num_bytes: ptx.copy_record(num_bytes) for num_bytes in _RECORD_BYTES}
_RESERVATIONS = {
    2 * warps * num_bytes: ptx.reserve(2 * warps * num_bytes)
    for num_bytes in _RECORD_BYTES
    for warps in (1, 2, 4)
}
_WAIT = gl.constexpr(ptx.wait_for_copies(1))
_PREFETCH = gl.constexpr(ptx.prefetch())
_BYTES_TO_FLOATS = gl.constexpr([ptx.byte_to_float(byte) for byte in range(4)])
_HALVES_TO_FLOATS = gl.constexpr([ptx.half_to_float(high) for high in range(2)])


@gluon.constexpr_function
def _load_ptx(kind, count, width):
    return _LOADS[kind, count, width][0]


@gluon.constexpr_function
def _load_constraints(kind, count, width):
    return _LOADS[kind, count, width][1]


@gluon.constexpr_function
def _copy_ptx(num_bytes):
    return _COPIES[num_bytes]


@gluon.constexpr_function
def _reserve_ptx(num_bytes):
    return _RESERVATIONS[num_bytes]


@gluon.constexpr_function
def _words(count):
    return [gl.int32] * count


@gluon.jit
def load_words(address, LOADS: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr):
    """Return what `ptx.load` loads, 512 bytes from load to load."""
    return gl.inline_asm_elementwise(
        _load_ptx(KIND, LOADS, WIDTH), _load_constraints(KIND, LOADS, WIDTH), [address],
        dtype=_words(LOADS * WIDTH), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def reserve_ring(warp, RECORD_BYTES: gl.constexpr, WARPS: gl.constexpr):
    """Return the address of a warp's two records in shared memory."""
    ring = gl.inline_asm_elementwise(
        _reserve_ptx(2 * WARPS * RECORD_BYTES), "=r,r", [warp], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    return ring + warp * (2 * RECORD_BYTES)


@gluon.jit
def copy_record(slot, record, lane, wanted, RECORD_BYTES: gl.constexpr):
    """Begin to copy a record into shared memory, if wanted."""
    gl.inline_asm_elementwise(
        _copy_ptx(RECORD_BYTES), "=r,r,r,l,r", [lane, slot + lane * 16, record + lane * 16, wanted],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_record(lane):
    """Wait until the older of two copies is there, and every lane is here."""
    gl.inline_asm_elementwise(_WAIT, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def byte_to_float(word, BYTE: gl.constexpr):
    """Return 2**23 + a byte."""
    return gl.inline_asm_elementwise(
        _BYTES_TO_FLOATS[BYTE], "=f,r", [word], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def half_to_float(word, HIGH: gl.constexpr):
    """Return a float16 half of a word."""
    return gl.inline_asm_elementwise(
        _HALVES_TO_FLOATS[HIGH], "=f,r", [word], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def load_step(
    record, lane, step: gl.constexpr, HIGH: gl.constexpr, SCALES: gl.constexpr,
    STEPS: gl.constexpr, LOW_BITS: gl.constexpr, HIGH_BITS: gl.constexpr, KIND: gl.constexpr,
    FROM: gl.constexpr,
):  # fmt: skip
    """Return words of the low plane, the high plane and the scales of a step.

    What several steps share comes with the first of them. FROM is a kind of loads.
    """
    at = record + lane * 16
    low = load_words(at + step * (128 * LOW_BITS), LOW_BITS // 4, 4, FROM)
    high = ()
    if HIGH_BITS == 2:
        if step % 2 == 0:
            high = load_words(at + (HIGH + step // 2 * 512), 1, 4, FROM)
    elif HIGH_BITS == 1:
        if STEPS == 2:
            if step == 0:
                high = load_words(record + HIGH + lane * 8, 1, 2, FROM)
        elif step % 4 == 0:
            high = load_words(at + (HIGH + step // 4 * 512), 1, 4, FROM)
    # A load of four words is two steps' scales, or four steps' where a step has one byte a row.
    shared: gl.constexpr = 2 if KIND == _FLOAT16 or KIND == _OF_16 else 4
    stored = ()
    if step % shared == 0:
        place = record + (SCALES + step // shared * 128) + (lane >> 2) * 16
        stored = load_words(place, 1, 4, FROM)
    return low, high, stored


@gluon.jit
def load_codes(
    record, lane, HIGH: gl.constexpr, SCALES: gl.constexpr, STEPS: gl.constexpr,
    LOW_BITS: gl.constexpr, HIGH_BITS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Return low plane, high plane and scales of a record in global memory."""
    low, high, stored = (), (), ()
    for step in gl.static_range(STEPS):
        more_low, more_high, more_stored = load_step(
            record, lane, step, HIGH, SCALES, STEPS, LOW_BITS, HIGH_BITS, KIND, "once"
        )
        low = low + more_low
        high = high + more_high
        stored = stored + more_stored
    return low, high, stored


@gluon.jit
def load_factors(place, lane, KIND: gl.constexpr, HAS_MINIMA: gl.constexpr, FROM: gl.constexpr):
    """Return the words from which `read_factors` reads."""
    g = lane >> 2
    words = ()
    if KIND != _FLOAT16:
        if HAS_MINIMA:
            words = load_words(place + g * 16, 1, 4, FROM)
        else:
            words = load_words(place + g * 8, 1, 2, FROM)
    return words


@gluon.jit
def read_factors(words, lane, KIND: gl.constexpr, HAS_MINIMA: gl.constexpr):
    """Return the four rows' factors of scales, these times -2**23, and minus those of minima."""
    zero = (lane * 0).to(gl.float32)
    factors, lowered, of_minima = (), (), ()
    for j in gl.static_range(4):
        if KIND == _FLOAT16:
            factor = zero
        elif HAS_MINIMA:
            factor = half_to_float(words[j], 0)
            of_minima = of_minima + (-half_to_float(words[j], 1),)
        else:
            factor = half_to_float(words[j // 2], j % 2)
        factors = factors + (factor,)
        lowered = lowered + (factor * -8388608.0,)
    return factors, lowered, of_minima


@gluon.jit
def load_minima(place, lane, STEPS: gl.constexpr, KIND: gl.constexpr, FROM: gl.constexpr):
    """Return the words from which `read_minima` reads."""
    if KIND == _BYTES:
        words = load_words(place + lane * 8, 1, 2, FROM)
    else:
        at = place + ((lane >> 2) * STEPS + gl.minimum(lane & 3, STEPS - 1)) * 8
        words = load_words(at, 1, 2, FROM)
        if STEPS == 8:
            words = words + load_words(at + 32, 1, 2, FROM)
    return words


@gluon.jit
def load_record(
    record, lane, HIGH: gl.constexpr, SCALES: gl.constexpr, MINIMA: gl.constexpr,
    FACTORS: gl.constexpr, STEPS: gl.constexpr, LOW_BITS: gl.constexpr, HIGH_BITS: gl.constexpr,
    KIND: gl.constexpr, HAS_MINIMA: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """Return low plane, high plane, scales, words of their factors and of minima.

    If STAGED the first three are nothing: they are read from shared memory step by step.
    """
    FROM: gl.constexpr = "shared" if STAGED else "once"
    if STAGED:
        low, high, stored = (), (), ()
    else:
        low, high, stored = load_codes(record, lane, HIGH, SCALES, STEPS, LOW_BITS, HIGH_BITS, KIND)
    factors = load_factors(record + FACTORS, lane, KIND, HAS_MINIMA, FROM)
    minima = ()
    if HAS_MINIMA:
        minima = load_minima(record + MINIMA, lane, STEPS, KIND, FROM)
    return low, high, stored, factors, minima


@gluon.jit
def read_minima(words, lane, STEPS: gl.constexpr, KIND: gl.constexpr):
    """Return the bits of eight floats: rows j in step c, then in step c + 4."""
    out = ()
    c = lane & 3
    for k in gl.static_range(2):
        for j in gl.static_range(4):
            if KIND == _BYTES:
                low = (byte_to_float(words[k], j) - 8388608.0).to(gl.int32, bitcast=True)
            elif 4 * k < STEPS:
                low = half_to_float(words[2 * k + j // 2], j % 2).to(gl.int32, bitcast=True)
                low = gl.where(c < STEPS, low, 0)
            else:
                low = lane * 0
            out = out + (low,)
    return out


@gluon.jit
def load_activation_sums(sums, lane, first_step, TILES: gl.constexpr, STEPS: gl.constexpr,
                         ONE: gl.constexpr):  # fmt: skip
    """Return for each tile: rough sum and rest in step c, then in step c + 4."""
    c = gl.minimum(lane & 3, STEPS - 1)
    g = lane >> 2
    out = ()
    for tile in gl.static_range(TILES):
        at = sums + tile * 512 + (first_step + c) * 64 + (c * 0 if ONE else g * 8)
        out = out + load_words(at, 1, 2, "global")
        if STEPS == 8:
            out = out + load_words(at + 256, 1, 2, "global")
        else:
            out = out + (lane * 0, lane * 0)
    return out


@gluon.jit
def prefetch_record(record, lane, RECORD_BYTES: gl.constexpr):
    """Ask the second-level cache for all of a record."""
    for line in gl.static_range((RECORD_BYTES + 4095) // 4096):
        at = record + gl.minimum(lane * 128 + line * 4096, RECORD_BYTES - 16)
        gl.inline_asm_elementwise(_PREFETCH, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)
