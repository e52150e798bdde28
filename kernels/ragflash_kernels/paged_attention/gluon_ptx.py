"""The PTX of attention on NVIDIA cards: every string is built by a function that says what it is.

A Gluon tensor there has one element a thread, so an instruction is a thread's own. In inline
assembly `$0 …` are first the results, then the arguments. Lane 4 g + c of a warp holds, of the
matrix instructions' fragments, rows g and g + 8, columns 2 c and 2 c + 1. It runs on sm_80 and
later.
"""

import struct
from collections.abc import Sequence

from ragflash_kernels.kv_codec.formats import LEVEL_UNITS, TQ3_LEVELS

KEY_LEVELS = (13, 40, 71, 114)  # TQ3_LEVELS times KEY_UNIT / LEVEL_UNITS, at most 0.25 % off
KEY_UNIT = 52.95
_MAGIC = 12582912.0  # 1.5 * 2**23: an integer of at most 22 bits is added to its bits


def registers(first: int, count: int) -> str:
    """Return `$first,$first+1,…`."""
    return ",".join(f"${first + i}" for i in range(count))


def constraints(results: str, arguments: str) -> str:
    """Return constraints, a letter each: r and l are 32- and 64-bit integers, f floats."""
    return ",".join([*(f"=&{letter}" for letter in results), *arguments])


def load(offsets: Sequence[int], width: int) -> str:
    """Return loads of `width` words each, 1, 2 or 4, at offsets from an address, not kept in L1."""
    kind = "ld.global.nc.L1::no_allocate" + {1: "", 2: ".v2", 4: ".v4"}[width]
    address = len(offsets) * width
    lines = []
    for i, offset in enumerate(offsets):
        target = registers(i * width, width)
        target = target if width == 1 else f"{{{target}}}"
        lines.append(f"{kind}.b32 {target}, [${address}+{offset}];")
    return " ".join(lines)


def load_constraints(offsets: Sequence[int], width: int) -> str:
    """Return the constraints of `load`."""
    return constraints("r" * len(offsets) * width, "l")


def half_to_float(high: int) -> str:
    """Return the lower or upper float16 of argument 1 as float32."""
    return "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, " + "ab"[high] + "; }"


def store_constants() -> str:
    """Store what `load_constants` loads at an address; result 0."""
    words = [
        *_key_tables(),
        *_value_tables(0),
        *_value_tables(1),
        0,
        0,
        *[int(_bits(_MAGIC), 0)] * 4,
    ]
    names = [f"c{i}" for i in range(len(words))]
    moves = " ".join(f"mov.b32 {n}, {word:#x};" for n, word in zip(names, words, strict=True))
    stores = " ".join(
        f"st.shared.v4.b32 [$1+{4 * i}], {{{', '.join(names[i : i + 4])}}};"
        for i in range(0, len(words), 4)
    )
    return f"{{ .reg .b32 c<{len(words)}>; {moves} {stores} mov.b32 $0, 0; }}"


def load_constants() -> str:
    """Return constants from an address: two tables of keys, four of values, four times 0x4B400000.

    Immediate ones would be moved into registers anew for each instruction, which takes a sixth of
    all instructions.
    """
    return (
        "{ .reg .b32 x, y; ld.shared.v4.b32 {$0, $1, $2, $3}, [$10]; "
        "ld.shared.v4.b32 {$4, $5, x, y}, [$10+16]; "
        "ld.shared.v4.b32 {$6, $7, $8, $9}, [$10+32]; }"
    )


def _key_tables() -> list[int]:
    """Return int8 levels of keys, then their negatives."""
    return [_word([sign * level & 255 for level in KEY_LEVELS]) for sign in (1, -1)]


def _value_tables(byte: int) -> list[int]:
    """Return a byte of float16 levels of values, then of their negatives."""
    halves = [[struct.pack("<e", s * v / LEVEL_UNITS) for v in TQ3_LEVELS] for s in (1, -1)]
    return [_word([half[byte] for half in four]) for four in halves]


def key_fragments(block: int) -> str:
    """Return 16 keys' int8 levels of a block of 32 values, the left side of a product of k = 32.

    Results: rows g and g + 8, their first four values, then their last four. Arguments: low words
    of the two rows, high words of the two rows, tables of keys.

    Args:
        block: Of the values that the words hold.
    """
    look_up = "prmt.b32 {}, $8, $9, {};"
    lines = [
        ".reg .b32 s, t, u;",
        _selector("s", "$4", "$6", block % 2, block % 4),
        _selector("t", "$5", "$7", block % 2, block % 4),
        look_up.format("$0", "s"),
        look_up.format("$1", "t"),
        "shr.u32 s, s, 16; shr.u32 t, t, 16;",
        look_up.format("$2", "s"),
        look_up.format("$3", "t"),
    ]
    return "{ " + " ".join(lines) + " }"


def value_fragments(odd: int) -> str:
    """Return 16 tokens' float16 values of a block of 32, the left side of products of k = 16.

    Results: four words of the first 16 values, four of the others. Arguments: low word, high word,
    scales of tokens 2 c and 2 c + 1, scales of tokens 2 c + 8 and 2 c + 9, tables of values.

    Args:
        odd: Whether the tile is the second one that the high word belongs to.
    """
    lines = [".reg .b32 s, u, l, h;"]
    for m in range(2):
        lines.append(_selector("s", "$8", "$9", m, 2 * odd + m))
        for row in range(2):
            first, second = 4 * m + row, 4 * m + row + 2
            lines += [
                "prmt.b32 l, $12, $13, s; prmt.b32 h, $14, $15, s;",
                f"prmt.b32 ${first}, l, h, 0x5140; prmt.b32 ${second}, l, h, 0x7362;",
                f"mul.rn.f16x2 ${first}, ${first}, $10; mul.rn.f16x2 ${second}, ${second}, $11;",
            ]
            if row == 0:
                lines.append("shr.u32 s, s, 16;")
    return "{ " + " ".join(lines) + " }"


def _selector(target: str, low: str, high: str, field: int, sign: int) -> str:
    """Return the codes of a group as nibbles: its level bits from `low`, its signs from `high`."""
    shift = f"shl.b32 u, {high}, {2 - sign};" if sign < 2 else f"shr.u32 u, {high}, {sign - 2};"
    return (
        f"shr.u32 {target}, {low}, {2 * field}; and.b32 {target}, {target}, 0x33333333; {shift} "
        f"lop3.b32 {target}, u, 0x44444444, {target}, 0xEA;"  # u & mask | target
    )


def _word(content: Sequence[int]) -> int:
    return sum(byte << 8 * i for i, byte in enumerate(content))


def multiply_keys() -> str:
    """Return scores of 16 tokens and eight queries with two blocks of values added.

    Results: scores of tokens g, g, g + 8, g + 8 with queries 2 c, 2 c + 1, 2 c, 2 c + 1. Arguments:
    the keys' fragments of the first block and of the second; where the queries' are; scales of
    the first block for tokens g and g + 8, of the second block; scores so far; four times the
    bits that integers are added to.
    """
    lines = [
        ".reg .b32 b<4>, d<4>; .reg .f32 t, s<4>;",
        "ld.global.v4.b32 {b0, b1, b2, b3}, [$12];",
    ]
    for block in range(2):
        lines.append(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {d0, d1, d2, d3}, "
            f"{{{registers(4 + 4 * block, 4)}}}, {{b{2 * block}, b{2 * block + 1}}}, "
            f"{{{registers(21, 4)}}};"
        )
        for i in range(4):
            before, after = (f"${17 + i}", f"s{i}") if block == 0 else (f"s{i}", f"${i}")
            lines += [
                f"mov.b32 t, d{i}; sub.f32 t, t, 0f{_MAGIC_HEX};",
                f"fma.rn.f32 {after}, t, ${13 + 2 * block + i // 2}, {before};",
            ]
    return "{ " + " ".join(lines) + " }"


def _bits(value: float) -> str:
    return "0x" + struct.pack(">f", value).hex()


_MAGIC_HEX = _bits(_MAGIC)[2:]
_SCALE_SCORES = (
    ".reg .f32 a, b, x, y, p<4>; ld.shared.v4.f32 {a, b, x, y}, [$1]; "
    "fma.rn.f32 p0, $3, a, x; fma.rn.f32 p1, $4, b, y; "
    "fma.rn.f32 p2, $5, a, x; fma.rn.f32 p3, $6, b, y; "
)


def weigh() -> str:
    """Turn a tile's scores into weights 2**(score - reference), and store them as right sides.

    Result: the largest exponent. Arguments: where the queries' scales and negative references
    are, where to store, four scores.
    """
    exponents = " ".join(f"ex2.approx.ftz.f32 p{i}, p{i};" for i in range(4))
    return (
        f"{{ {_SCALE_SCORES} .reg .b32 u, v; "
        f"max.f32 a, p0, p1; max.f32 b, p2, p3; max.f32 $0, a, b; {exponents} "
        "cvt.rn.f16x2.f32 u, p1, p0; cvt.rn.f16x2.f32 v, p3, p2; "
        "movmatrix.sync.aligned.m8n8.trans.b16 u, u; movmatrix.sync.aligned.m8n8.trans.b16 v, v; "
        "st.shared.v2.b32 [$2], {u, v}; }"
    )


def store_maxima() -> str:
    """Store the largest exponents of eight queries over a tile; arguments as in `weigh`; 0."""
    spread = " ".join(
        f"shfl.sync.bfly.b32 x, {v}, {lanes}, 0x1f, 0xffffffff; max.f32 {v}, {v}, x;"
        for lanes in (4, 8, 16)
        for v in "ab"
    )
    return (
        f"{{ {_SCALE_SCORES} max.f32 a, p0, p2; max.f32 b, p1, p3; {spread} "
        "st.shared.v2.f32 [$2], {a, b}; mov.b32 $0, 0; }"
    )


def largest(count: int, stride: int) -> str:
    """Return the largest of `count` shared floats, `stride` bytes apart, from an address on."""
    more = " ".join(
        f"ld.shared.f32 t, [$1+{stride * i}]; max.f32 $0, $0, t;" for i in range(1, count)
    )
    return f"{{ .reg .f32 t; ld.shared.f32 $0, [$1]; {more} }}"


def multiply_values() -> str:
    """Return sums over tokens of 32 values and eight queries, with 16 tokens added.

    Results: eight sums: values g, g, g + 8, g + 8 of the first 16, then of the others. Arguments:
    where the weights are, the fragments of `value_fragments`, sums so far.
    """
    products = " ".join(
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{registers(4 * m, 4)}}}, "
        f"{{{registers(9 + 4 * m, 4)}}}, {{p, q}}, {{{registers(17 + 4 * m, 4)}}};"
        for m in range(2)
    )
    return f"{{ .reg .b32 p, q; ld.shared.v2.b32 {{p, q}}, [$8]; {products} }}"


def add_weights() -> str:
    """Return the sums of weights of queries 2 c and 2 c + 1, with 16 tokens added.

    Results: two sums. Arguments: where the weights are, sums so far.
    """
    return (
        "{ .reg .b32 p, q, o; .reg .f32 x, y; mov.b32 o, 0x3C003C00; "
        "ld.shared.v2.b32 {p, q}, [$2]; mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0, $1, x, y}, {o, o, o, o}, {p, q}, {$3, $4, $3, $4}; }"
    )


def shared_memory() -> str:
    """Return the address of `%` bytes of shared memory; the argument is of no use."""
    return "{ .shared .align 16 .b8 memory[%d]; mov.u32 $0, memory; }"


def barrier() -> str:
    """Wait for all threads, then return the shared word at an address."""
    return "bar.sync 0; ld.shared.b32 $0, [$1];"


def mark_above(limit: float) -> str:
    """Store a word if a float is above a limit; arguments: float, address, word; result 0."""
    return (
        f"{{ .reg .pred p; setp.gt.f32 p, $1, 0f{_bits(limit)[2:]}; "
        "@p st.shared.b32 [$2], $3; mov.b32 $0, 0; }"
    )


def store_if(width: int) -> str:
    """Store one or two floats; arguments: condition, shared address, floats; result 0."""
    what = ("v2.f32 [$2], {$3, $4}", "f32 [$2], $3")[width == 1]
    return f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.{what}; mov.b32 $0, 0; }}"


def load_shared(width: int) -> str:
    """Return one or two shared floats from an address."""
    return ("ld.shared.v2.f32 {$0, $1}, [$2];", "ld.shared.f32 $0, [$1];")[width == 1]


def prefetch_if() -> str:
    """Ask the second-level cache for the line of an address if a condition holds; result 0."""
    return "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$2]; mov.b32 $0, 0; }"


def make_finite() -> str:
    """Return two float16 without their signs, and what is not finite replaced by argument 2."""
    return "and.b32 $0, $1, 0x7FFF7FFF; min.f16x2 $0, $0, $2;"


def power() -> str:
    """Return 2 to the power of a float."""
    return "ex2.approx.ftz.f32 $0, $1;"
