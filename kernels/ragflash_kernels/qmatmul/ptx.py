"""The PTX of the kernel for NVIDIA cards: every string is built by a function that says what it is.

A Gluon tensor there has one element a thread, so an instruction is a thread's own. In inline
assembly `$0 …` are first the results, then the arguments. All of it runs on sm_80 and later.
"""

from ragflash_kernels.qmatmul.formats import IQ4_VALUES

MAGIC = 12582912.0  # 1.5 * 2**23: an integer of at most 22 bits is added to its bits, 0x4B400000


def registers(first: int, count: int) -> str:
    """Return `$first,$first+1,…`."""
    return ",".join(f"${first + i}" for i in range(count))


def constraints(results: str, arguments: str) -> str:
    """Return constraints, a letter each: r and l are 32- and 64-bit integers, f floats."""
    return ",".join([*(f"={letter}" for letter in results), *arguments])


KINDS_OF_LOADS = {
    "global": "ld.global",
    "once": "ld.global.nc.L1::no_allocate",  # keeps what is not wanted again out of that cache
    "shared": "ld.shared",
}


def load(kind: str, loads: int, width: int, stride: int) -> str:
    """Return `loads` loads of `width` words, `stride` bytes apart, from the address that follows.

    Args:
        kind: A key of `KINDS_OF_LOADS`.
        loads: How many.
        width: Words of 32 bits: 1, 2 or 4.
        stride: Bytes.
    """
    vector = {1: "", 2: ".v2", 4: ".v4"}[width]
    address = loads * width
    lines = []
    for i in range(loads):
        target = registers(i * width, width)
        target = target if width == 1 else f"{{{target}}}"
        lines.append(f"{KINDS_OF_LOADS[kind]}{vector}.b32 {target}, [${address}+{i * stride}];")
    return " ".join(lines)


def load_constraints(kind: str, loads: int, width: int) -> str:
    """Return the constraints of `load`."""
    return constraints("r" * loads * width, "r" if kind == "shared" else "l")


def reserve(num_bytes: int) -> str:
    """Return the reservation of a program's shared memory, at most 48 KB; result: its address."""
    return f"{{ .shared .align 16 .b8 ring[{num_bytes}]; mov.u32 $0, ring; }}"


def copy_record(num_bytes: int) -> str:
    """Return a warp's copy of a record into shared memory that no lane reads any more, as a group.

    Result 0 is nothing. Arguments: the lane; where its 16 bytes of every 512 go and come from;
    whether there is a record.

    Args:
        num_bytes: Of the record, a multiple of 16.
    """
    whole, rest = divmod(num_bytes, 512)
    lines = [".reg .pred wanted, inside;", "setp.ne.b32 wanted, $4, 0;", "bar.warp.sync -1;"]
    copy = "cp.async.cg.shared.global [$2+{0}], [$3+{0}], 16;"
    lines += ["@wanted " + copy.format(512 * i) for i in range(whole)]
    if rest:
        lines.append(f"setp.lt.and.u32 inside, $1, {rest // 16}, wanted;")
        lines.append("@inside " + copy.format(512 * whole))
    lines += ["cp.async.commit_group;", "mov.b32 $0, 0;"]
    return "{ " + " ".join(lines) + " }"


def wait_for_copies(younger: int) -> str:
    """Return the wait of a warp until only so many younger groups are on their way; result 0."""
    return f"cp.async.wait_group {younger}; bar.warp.sync -1; mov.b32 $0, 0;"


def prefetch() -> str:
    """Return a request to have the line of an address in the second-level cache; result 0."""
    return "prefetch.global.L2 [$1]; mov.b32 $0, 0;"


def nibbles(high_bits: int, row: int, *, signed: bool) -> str:
    """Return the unpacking of one row of a step: results half 0, half 1; arguments w, and h.

    Codes without a sign fill the low bits of their bytes, signed ones the high bits, so that no
    extension is needed: a product is then 2**(8 - bits) times as large.

    Args:
        high_bits: Bits in the high plane, whose word h is there only if this is not 0.
        row: j, 0 … 3.
        signed: Of the codes.
    """
    up = 4 - high_bits if signed else 0  # where the low nibble begins in its byte
    mask = 0x0F0F0F0F << up & 0xFFFFFFFF
    lines = [".reg .b32 t;"]
    for half in range(2):
        lines += [_shifted("t", "$2", up - 4 * half), f"and.b32 ${half}, t, {mask:#x};"]
        if high_bits:
            stored = 2 * row + half if high_bits == 1 else 4 * (row % 2) + 2 * half
            high_mask = ((1 << high_bits) - 1) * 0x01010101 << (up + 4)
            lines += [
                _shifted("t", "$3", up + 4 - stored),
                f"lop3.b32 ${half}, t, {high_mask:#x}, ${half}, 0xEA;",  # t & mask | low
            ]
    return "{ " + " ".join(lines) + " }"


def _shifted(target: str, source: str, left: int) -> str:
    if left >= 0:
        return f"shl.b32 {target}, {source}, {left};"
    return f"shr.u32 {target}, {source}, {-left};"


def table() -> str:
    """Return the look-up of one row of a step: results half 0, half 1; argument w.

    A byte permutation looks four codes up among eight values by the low three bits; a second one
    picks between the lower and the upper eight by the fourth.
    """
    words = [
        sum((value & 255) << 8 * i for i, value in enumerate(IQ4_VALUES[first : first + 4]))
        for first in range(0, 16, 4)
    ]
    tables = [f"{word:#x}" for word in words]
    lines = [".reg .b32 w, s, low, high, pick;", "mov.b32 w, $2;"]
    for half in range(2):
        lines += [
            "and.b32 s, w, 0x7777;",
            f"prmt.b32 low, {tables[0]}, {tables[1]}, s;",
            f"prmt.b32 high, {tables[2]}, {tables[3]}, s;",
            "shr.u32 pick, w, 1;",
            "lop3.b32 pick, pick, 0x4444, 0x3210, 0xEA;",
            f"prmt.b32 ${half}, low, high, pick;",
        ]
        if half == 0:
            lines.append("shr.u32 w, w, 16;")
    return "{ " + " ".join(lines) + " }"


def multiply(k: int, *, one: bool) -> str:
    """Return a product of 16 rows and 8 columns over k codes, added to the sums.

    Results: sums. Arguments: the left fragment (4 registers, 2 for k = 16), the right one (2 or
    1); the scales of columns 2 c and 2 c + 1 and these times -MAGIC; the scales of rows g and
    g + 8; sums. The integers start at MAGIC's bits, so they come out as floats; a multiply-add
    takes MAGIC off and scales by the column, a second one by the row.

    Args:
        k: 32 or 16.
        one: Only column 0 is wanted: two sums, one column scale.
    """
    left, right = (4, 2) if k == 32 else (2, 1)
    columns = 1 if one else 2
    num_sums = 2 * columns
    start = [num_sums]
    for count in (left, right, columns, columns, 2):
        start.append(start[-1] + count)
    a, b, scale, lowered, row, acc = start
    lines = [
        ".reg .b32 d<4>, m; .reg .f32 t;",
        "mov.b32 m, 0x4B400000;",
        f"mma.sync.aligned.m16n8k{k}.row.col.s32.s8.s8.s32 {{d0,d1,d2,d3}}, "
        f"{{{registers(a, left)}}}, {{{registers(b, right)}}}, {{m,m,m,m}};",
    ]
    for i in range(num_sums):
        column, pair = i % columns, i // columns
        lines += [
            f"mov.b32 t, d{2 * pair + column};",
            f"fma.rn.f32 t, t, ${scale + column}, ${lowered + column};",
            f"fma.rn.f32 ${i}, t, ${row + pair}, ${acc + i};",
        ]
    return "{ " + " ".join(lines) + " }"


def multiply_constraints(k: int, *, one: bool) -> str:
    """Return the constraints of `multiply`."""
    columns = 1 if one else 2
    sums = "f" * 2 * columns
    return constraints(sums, "r" * (6 if k == 32 else 3) + "f" * (2 * columns + 2) + sums)


def byte_to_float(byte: int) -> str:
    """Return byte `byte` of argument 1 as the float 2**23 + byte."""
    return f"prmt.b32 $0, $1, 0x4B000000, 0x744{byte};"


def half_to_float(high: int) -> str:
    """Return the lower or upper float16 of argument 1 as float32."""
    return "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, " + "ab"[high] + "; }"


def multiply_minima() -> str:
    """Return 16 rows' minima times 8 columns' sums over 8 steps, in tensor float 32.

    Results: four floats. Arguments, as bits: minima of rows g, g + 8 in step c, then in step
    c + 4; the rough sums of column g in the two steps, then the rests.
    """
    mma = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    return (
        "{ .reg .f32 z; mov.f32 z, 0f00000000; "
        f"{mma} {{{registers(0, 4)}}}, {{{registers(4, 4)}}}, {{$10,$11}}, {{z,z,z,z}}; "
        f"{mma} {{{registers(0, 4)}}}, {{{registers(4, 4)}}}, {{$8,$9}}, {{{registers(0, 4)}}}; "
        "}"
    )


def store_eight(conversion: str) -> str:
    """Return the rounding and writing of eight floats of a row by every lane.

    Lane c of four has columns 4 c … 4 c + 3 of each half of a step. Neighbours exchange, so that
    an even lane writes its and the next lane's columns of half 0, an odd one those of half 1 and
    the lane's before: 16 bytes in a row. Result 0 is nothing. Arguments: four floats of half 0,
    four of half 1, whether the lane is odd, whether it writes, and where.

    Args:
        conversion: Of two floats into a word, the upper one first.
    """
    lines = [".reg .pred odd, writes; .reg .b32 w<4>, own<2>, sent<2>;"]
    lines += [f"{conversion} w{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(4)]
    lines += ["setp.ne.b32 odd, $9, 0;", "setp.ne.b32 writes, $10, 0;"]
    for i in range(2):
        lines += [
            f"selp.b32 sent{i}, w{i}, w{2 + i}, odd;",
            f"selp.b32 own{i}, w{2 + i}, w{i}, odd;",
            f"shfl.sync.bfly.b32 sent{i}, sent{i}, 1, 31, -1;",
        ]
    for i in range(2):
        lines += [
            f"selp.b32 w{i}, sent{i}, own{i}, odd;",
            f"selp.b32 w{2 + i}, own{i}, sent{i}, odd;",
        ]
    lines += ["@writes st.global.v4.b32 [$11], {w0, w1, w2, w3};", "mov.b32 $0, 0;"]
    return "{ " + " ".join(lines) + " }"
