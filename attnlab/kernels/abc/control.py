"""What the ABC kernels share: where a unit of tokens lies, and control weights under a reference that moves.

exp(s_i - z_t) is at most 1, but as a product of a part of i and a part of t it needs a reference: exp(s_i - r) and
exp(r - z_t). One r serves rows t whose running maximum lies at most WIDTH below it; where logits climb further within
a chunk, the rows that are left take the next r below. Almost always the first is enough.
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
    "LEAST",
    "LOG_HALF",
    "LOG_QUARTER",
    "MENDS",
    "add_dot",
    "chunk_masks",
    "exp",
    "exp_below",
    "in_full",
    "inverse",
    "load_logits",
    "locate",
    "lowest",
    "next_reference",
    "place_of",
    "references",
    "rounded",
    "weigh",
    "within",
    "zeros",
]

# The logarithm of nothing, as in attnlab.mechanisms._bounded.slots.
EMPTY = tl.constexpr(-1e30)
HALF_EMPTY = tl.constexpr(-5e29)
# Rows below the reference by this much still weigh terms down to exp(-20) without leaving float32's and bf16's range.
WIDTH = tl.constexpr(60.0)
# exp(-WIDTH), and room for rounding.
LEAST = tl.constexpr(4e-27)
# What kind a chunk is: whether it needs several references, and whether its keys may fill a slot, because at most half
# of it was there before; then sums over later queries are mended.
IS_WIDE = tl.constexpr(1)
MENDS = tl.constexpr(2)
LOG_HALF = tl.constexpr(-0.6931471805599453)
# A slot of which one key is more than a quarter keeps more digits, where there are few slots.
LOG_QUARTER = tl.constexpr(-1.3862943611198906)
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def exp(x):
    """exp(x), in float32 by one instruction and a product: subnormal results are zero."""
    return tl.exp(x) if INTERPRETED or x.dtype == tl.float64 else _power_of_two(x * LOG2E)


@triton.jit
def exp_below(x, top, scale):
    """exp(scale (x - top)), in float32 by one product-and-sum and one instruction."""
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
    """x in CT, two numbers at a time: those that are wanted in float32 again would be rounded one by one, slowly."""
    if CT == tl.bfloat16 and not INTERPRETED:  # noqa: SIM300
        result = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        result = x.to(CT)
    return result


@triton.jit
def in_full(x, CT: tl.constexpr):
    """x as sums of products of CT are: in float32, or in float64 where CT is."""
    return x.to(tl.float64) if CT == tl.float64 else x.to(tl.float32)  # noqa: SIM300


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr, CT: tl.constexpr):
    """Where sums of products of CT begin."""
    return in_full(tl.zeros([M, N], tl.float32), CT)


@triton.jit
def add_dot(a, b, acc, PREC: tl.constexpr):
    """acc + a b."""
    return tl.dot(a, b, acc, input_precision=PREC, out_dtype=acc.dtype)


@triton.jit
def inverse(x):
    """1 / x, or of LEAST where x is smaller; in float32 by one instruction."""
    x = tl.maximum(x, LEAST)
    if INTERPRETED or x.dtype == tl.float64:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def place_of(heads, GROUPED: tl.constexpr):
    """A program's unit and query head; GROUPED, heads that read one memory come together and find it in the cache."""
    if GROUPED:
        return tl.program_id(0) // heads, tl.program_id(0) % heads
    return tl.program_id(0), tl.program_id(1)


@triton.jit
def locate(unit, table, T, NT, L, VARLEN: tl.constexpr):
    """The batch row, the sequence, the first token and the number of tokens of a unit of at most L tokens."""
    if VARLEN:
        b = unit * 0
        start = tl.load(table + unit * 3)
        length = tl.load(table + unit * 3 + 1)
        seq = tl.load(table + unit * 3 + 2)
    else:
        b = unit // NT
        start = (unit - b * NT) * L
        length = tl.minimum(T - start, L)
        seq = b
    return b, seq, start, length


@triton.jit
def within(i, limit, ALL: tl.constexpr):
    """i < limit, which the compiler need not look at where it is so for ALL."""
    if ALL:
        return tl.zeros(i.shape, tl.int32) == 0
    return i < limit


@triton.jit
def chunk_masks(
    length, visible, b, sm, start, n,
    C: tl.constexpr, NP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A chunk's rows and slots; which rows are tokens, which of these may be seen, and which slots are no padding."""
    rows, slots = tl.arange(0, C), tl.arange(0, NP)
    inside = within(rows, length, EVEN)
    ok = inside
    if MASKED:
        ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
    return rows, slots, inside, ok, within(slots, n, FULL)


@triton.jit
def load_logits(s, stride, rows, ok, slots, real):
    """s of these tokens in float32, EMPTY for what is hidden and for slots that only pad."""
    return tl.load(s + rows[:, None] * stride + slots, mask=ok[:, None] & real, other=EMPTY).to(tl.float32)


@triton.jit
def lowest(s, z, top):
    """A lower bound of each slot's running maximum over the rows where it is not empty."""
    least = tl.min(tl.where(s > HALF_EMPTY, s, top[None, :]), 0)
    return tl.where(z > HALF_EMPTY, z, least)


@triton.jit
def next_reference(s, z, low, ref):
    """The next reference below, for the slots that need one."""
    below = ref - WIDTH
    found = tl.max(tl.where(s < below[None, :], s, EMPTY), 0)
    found = tl.maximum(found, tl.where(z < below, z, EMPTY))
    return tl.where(low < below, found, ref)


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
    """exp(s - r), exp(z - r) for the past, and their sums up to each row."""
    e = exp(s - ref[None, :]).to(CT)
    w = exp(z - ref)
    return e, w, tl.dot(tri, e, input_precision=PREC) + w[None, :]
