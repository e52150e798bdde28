"""A head of Q, K or V a program, in plain Triton."""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns

_LARGEST = tl.constexpr(65504.0)  # of float16


@triton.jit
def _saturate(x):
    """Return float16; NaN stays NaN."""
    return tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x)).to(tl.float16)


@triton.jit
def _load_norm(norm, at, NORM: tl.constexpr):
    if NORM:
        weight = tl.load(norm + at)
    else:
        weight = tl.full(at.shape, 1.0, tl.float32)
    return weight


@triton.jit
def _rotated_head(
    parts, part_stride, at, weight, paired_weight, cos, sin, angle_at, d, eps, DIM: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Return a head's DIM values normalised and rotated, float32; `at` is where they begin."""
    rotates = d < 2 * HALF
    pair = tl.where(d < HALF, d + HALF, d - HALF)
    x = load_columns(parts, part_stride, at + d, d < DIM, PARTS)
    paired = load_columns(parts, part_stride, at + pair, rotates, PARTS)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
        x = x * factor * weight
        paired = paired * factor * paired_weight
    c = tl.load(cos + angle_at + d % HALF, mask=rotates, other=1.0)
    s = tl.load(sin + angle_at + d % HALF, mask=rotates, other=0.0)
    return x * c + tl.where(d < HALF, -paired, paired) * s


@triton.jit(do_not_specialize=["q_heads", "kv_heads"])
def attention_inputs_kernel(
    q, k, v, q_norm, k_norm, cos, sin, row_pages, row_places, keys, values, q_out,
    q_part_stride, k_part_stride, v_part_stride, q_row_stride, k_row_stride, v_row_stride,
    page_stride, eps, q_heads, kv_heads, PAGE: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, Q_PARTS: tl.constexpr, K_PARTS: tl.constexpr, V_PARTS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Write a head of a row: of Q to `q_out [rows, q_heads, DIM]`, of K and V to its page.

    `q`, `k` and `v` point to the first of their columns; strides are in elements. HALF pairs are
    rotated. EAGER: let the next kernel start, and wait for the one before when weights are on
    their way (sm_90).
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    pair = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
    if head < q_heads:
        weight, paired_weight = _load_norm(q_norm, d, Q_NORM), _load_norm(q_norm, pair, Q_NORM)
        if EAGER:
            tl.extra.cuda.gdc_wait()
        x = _rotated_head(
            q, q_part_stride, row * q_row_stride + head * DIM, weight, paired_weight, cos, sin,
            row * HALF, d, eps, DIM, HALF, Q_PARTS, Q_NORM,
        )  # fmt: skip
        target = (row.to(tl.int64) * q_heads + head) * DIM
        tl.store(q_out + target + d, _saturate(x))
    else:
        weight, paired_weight = _load_norm(k_norm, d, K_NORM), _load_norm(k_norm, pair, K_NORM)
        if EAGER:
            tl.extra.cuda.gdc_wait()
        page = tl.load(row_pages + row)
        kv_head = (head - q_heads) % kv_heads
        target = page.to(tl.int64) * page_stride + kv_head * (PAGE * DIM)
        target += tl.load(row_places + row) * DIM
        if page >= 0:
            if head < q_heads + kv_heads:
                x = _rotated_head(
                    k, k_part_stride, row * k_row_stride + kv_head * DIM, weight, paired_weight,
                    cos, sin, row * HALF, d, eps, DIM, HALF, K_PARTS, K_NORM,
                )  # fmt: skip
                tl.store(keys + target + d, _saturate(x))
            else:
                at = row * v_row_stride + kv_head * DIM + d
                x = load_columns(v, v_part_stride, at, d < DIM, V_PARTS)
                tl.store(values + target + d, _saturate(x))
