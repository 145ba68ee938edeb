"""What the ABC kernels share: where a chunk of tokens lies, elementwise functions, and weights of control logits.

The weight of key i for query t, exp(s_i - z_t), is at most 1. A matrix product needs it as a factor of i times a factor
of t: exp(s_i - r) and exp(r - z_t) for some reference r. One r serves the rows t whose running maximum lies at most
WIDTH below it. Where logits climb further within a chunk (a "wide" chunk), the remaining rows take the next reference
below. For almost every chunk the first reference is enough.
"""

# mypy: ignore-errors

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = [
    "EMPTY",
    "HALF_EMPTY",
    "IS_WIDE",
    "KEYS_MAY_FILL",
    "LEAST",
    "LOG_HALF",
    "LOG_QUARTER",
    "add_dot",
    "chunk_and_head",
    "chunk_masks",
    "exp",
    "exp_below",
    "in_full",
    "inverse",
    "load_logits",
    "locate_chunk",
    "lowest",
    "next_reference",
    "references",
    "rounded",
    "weigh",
    "within",
    "zeros",
]

# The logarithm of an empty slot's weight, as in attnlab.mechanisms._bounded.slots.
EMPTY = tl.constexpr(-1e30)
HALF_EMPTY = tl.constexpr(-5e29)
# Rows below the reference by this much still weigh terms down to exp(-20) without leaving float32's and bf16's range.
WIDTH = tl.constexpr(60.0)
# exp(-WIDTH), and room for rounding.
LEAST = tl.constexpr(4e-27)
# Flags of a chunk, stored as bits of one integer: IS_WIDE, it needs several references; KEYS_MAY_FILL, at most half of
# some slot's weight is older than the chunk, so that one of its keys may fill the slot. Then the rounding of sums over
# later queries is corrected (``sum_back``).
IS_WIDE = tl.constexpr(1)
KEYS_MAY_FILL = tl.constexpr(2)
LOG_HALF = tl.constexpr(-0.6931471805599453)
# With few slots, a slot of which one key makes more than a quarter keeps more digits (LOW_PARTS).
LOG_QUARTER = tl.constexpr(-1.3862943611198906)
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def exp(x):
    """exp(x); in float32 one product and one instruction, which flushes subnormal results to zero."""
    return tl.exp(x) if INTERPRETED or x.dtype == tl.float64 else _power_of_two(x * LOG2E)


@triton.jit
def exp_below(x, top, scale):
    """exp(scale (x - top)); in float32 one fused multiply-add and one instruction."""
    if INTERPRETED or x.dtype == tl.float64:
        result = tl.exp((x - top) * scale)
    else:
        scale = scale * LOG2E
        result = _power_of_two(x * scale - top * scale)
    return result


@triton.jit
def _power_of_two(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rounded(x, CT: tl.constexpr):
    """x rounded to CT, two numbers to an instruction; Triton's own cast takes one at a time if x is used again."""
    if CT == tl.bfloat16 and not INTERPRETED:  # noqa: SIM300
        result = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        result = x.to(CT)
    return result


@triton.jit
def in_full(x, CT: tl.constexpr):
    """x in the dtype in which products of CT are summed: float64 where CT is float64, else float32."""
    return x.to(tl.float64) if CT == tl.float64 else x.to(tl.float32)  # noqa: SIM300


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr, CT: tl.constexpr):
    """A zero accumulator for products of CT."""
    return in_full(tl.zeros([M, N], tl.float32), CT)


@triton.jit
def add_dot(a, b, acc, PREC: tl.constexpr):
    """acc + a b."""
    return tl.dot(a, b, acc, input_precision=PREC, out_dtype=acc.dtype)


@triton.jit
def inverse(x):
    """1 / max(x, LEAST); in float32 one instruction."""
    x = tl.maximum(x, LEAST)
    if INTERPRETED or x.dtype == tl.float64:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def chunk_and_head(heads, GROUPED: tl.constexpr):
    """A program's chunk and query head. GROUPED puts heads that read one memory next to each other, for the cache."""
    if GROUPED:
        return tl.program_id(0) // heads, tl.program_id(0) % heads
    return tl.program_id(0), tl.program_id(1)


@triton.jit
def locate_chunk(chunk, table, T, NT, L, PACKED: tl.constexpr):
    """A chunk's batch row, sequence, first token and number of tokens (at most L)."""
    if PACKED:
        b = chunk * 0
        start = tl.load(table + chunk * 3)
        length = tl.load(table + chunk * 3 + 1)
        seq = tl.load(table + chunk * 3 + 2)
    else:
        b = chunk // NT
        start = (chunk - b * NT) * L
        length = tl.minimum(T - start, L)
        seq = b
    return b, seq, start, length


@triton.jit
def within(i, limit, ALL: tl.constexpr):
    """i < limit; with ALL it holds for every i, and the mask is a constant that the compiler removes."""
    if ALL:
        return tl.zeros(i.shape, tl.int32) == 0
    return i < limit


@triton.jit
def chunk_masks(
    length, visible, b, sm, start, n,
    C: tl.constexpr, NP: tl.constexpr, FULL_CHUNKS: tl.constexpr, FULL_SLOTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Row and slot indices of a chunk, and masks: rows that are tokens, visible tokens, slots that are not padding."""
    rows, slots = tl.arange(0, C), tl.arange(0, NP)
    inside = within(rows, length, FULL_CHUNKS)
    ok = inside
    if MASKED:
        ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
    return rows, slots, inside, ok, within(slots, n, FULL_SLOTS)


@triton.jit
def load_logits(s, stride, rows, ok, slots, real):
    """Control logits of these tokens in float32; EMPTY for hidden tokens and padding slots."""
    return tl.load(s + rows[:, None] * stride + slots, mask=ok[:, None] & real, other=EMPTY).to(tl.float32)


@triton.jit
def lowest(s, z, top):
    """A lower bound of each slot's running maximum over the rows where it is not empty."""
    least = tl.min(tl.where(s > HALF_EMPTY, s, top[None, :]), 0)
    return tl.where(z > HALF_EMPTY, z, least)


@triton.jit
def next_reference(s, z, low, ref):
    """The next reference below ``ref``, for the slots that need one."""
    below = ref - WIDTH
    highest = tl.max(tl.where(s < below[None, :], s, EMPTY), 0)
    highest = tl.maximum(highest, tl.where(z < below, z, EMPTY))
    return tl.where(low < below, highest, ref)


@triton.jit
def references(s, z, low, top):
    """How many references the chunk needs."""
    ref, count = top, 1
    while tl.max(ref - low) > WIDTH:
        ref = next_reference(s, z, low, ref)
        count += 1
    return count


@triton.jit
def weigh(s, z, ref, tri, CT: tl.constexpr, PREC: tl.constexpr):
    """exp(s - r) of the chunk's keys, exp(z - r) of the past, and the sum of both up to each row.

    ``tri`` is the triangle of ones whose product with the weights takes their running sums.
    """
    e = exp(s - ref[None, :]).to(CT)
    w = exp(z - ref)
    return e, w, tl.dot(tri, e, input_precision=PREC) + w[None, :]
