"""How a call is cut into chunks, tiles and segments, and which dtype its products take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.kernels.abc.launcher import Options
from attnlab.kernels.abc.recipes import Calls
from attnlab.kernels.abc.units import cut_units

__all__ = [
    "Form",
    "Plan",
    "Units",
    "Walk",
    "grid_of",
    "plan_for",
    "segments_of",
    "tiles",
    "unit_count",
    "units_of",
    "walks",
]

# Columns at a time, stages, registers a thread may take, and warps, for bf16 and slots up to 64 or 128; measured on an
# H200. What walks along sequences takes 64 slots at a time.
Settings = tuple[int, int, int | None, int]
TUNED: dict[tuple[str, int], Settings] = {
    ("write", 64): (64, 4, None, 4),
    ("sum", 64): (64, 4, None, 4),
    ("read", 64): (64, 3, 168, 4),
    ("query", 64): (64, 3, None, 4),
    ("key", 64): (128, 1, None, 4),
    ("read", 128): (64, 2, None, 4),
    ("query", 128): (64, 1, None, 4),
    ("key", 128): (64, 1, None, 4),
}
# Others for heads of up to 64, for few slots and gradients, and for heads that have keys and values side by side.
NARROW: dict[tuple[str, int], Settings] = {("key", 64): (64, 1, 168, 4)}
FEW: dict[tuple[str, int], Settings] = {("read", 64): (64, 2, 168, 4)}
PAIRED: dict[tuple[str, int], Settings] = {("read", 64): (64, 1, 128, 4), ("query", 64): (64, 1, None, 4)}
# Programs that keep the card busy: two on nearly every multiprocessor, and never a third on a few.
BUSY = 256
# Programs of ``write_states`` that are on the card at once: with its settings, and with fewer stages and registers.
FIT, FIT_BY_LESS, LESS = 396, 528, {"num_stages": 3, "maxnreg": 128}

# Where a few keys fill all slots, the logits' gradient is what is left of sums over all later queries that cancel, and
# float32 leaves 250 times its rounding. From these numbers of slots on, bf16 has products of bf16, and float32 its own;
# with fewer, bf16 has those of float32, and float32 those of float64, which tensor cores make faster, too.
HALF_FROM, SINGLE_FROM = 8, 33
# GPUs that have such (measured on 9.0; for the others the kernels compile).
DOUBLES = ((8, 0), (9, 0), (10, 0))


@dataclass(frozen=True, eq=False)
class Plan:
    """Tiles of a (head size, slots, dtype): C tokens, NP slots with padding (BN where they are apart), BD columns.

    Products are of CT. ``one`` says that there are registers for all columns of key gradients.
    """

    d: int
    slots: int
    C: int
    NP: int
    BN: int
    BD: int
    CT: tl.dtype
    PREC: str
    half: bool
    fine: bool
    paired: bool
    one: bool
    state: torch.dtype
    sums: torch.dtype
    weight: torch.dtype
    warps: int
    stages: int

    @property
    def full(self) -> torch.dtype:
        """What sums of products, scores and logarithms are kept in."""
        return torch.float64 if self.CT == tl.float64 else torch.float32  # noqa: SIM300

    @property
    def loose(self) -> bool:
        """Whether chunks of several references take kernels that know little of their sizes."""
        return self.half and self.NP > 128


@dataclass(frozen=True)
class Form:
    """What kind of call it is, as far as kernels are made for it: even without a shorter chunk at the end."""

    causal: bool
    even: bool
    packed: bool
    masked: bool
    started: bool = False
    groups: int = 1


@dataclass(frozen=True)
class Units:
    """Tokens cut into units of at most ``size``: ``count`` of them, ``per_row`` in a row unless they are packed."""

    size: int
    count: int
    per_row: int
    sequences: int
    table: Tensor | None
    bounds: Tensor | None


@dataclass(frozen=True)
class Walk:
    """One launch of a kernel that walks along sequences."""

    programs: int
    segments: int
    options: Options


@cache
def plan_for(d: int, slots: int, dtype: torch.dtype, train: bool) -> Plan:
    """Tiles that fit the registers and shared memory of the pair."""
    half = dtype == torch.bfloat16 and slots >= HALF_FROM
    double = dtype == torch.float32 and slots < SINGLE_FROM and _doubles()
    # Few slots are often filled by one key each, and then bf16 states are too coarse for the logits' gradient. For more
    # of them there would be no room.
    fine = half and slots <= 32 and train
    # Products with fewer than 64 rows or columns come out wrong on Hopper in bf16 (Triton 3.6).
    NP = max(16 if double else 64, triton.next_power_of_2(slots))
    C = (64 if NP <= 128 else 32) if half else (32 if NP <= 64 else 16)
    exact, kept = (tl.float64, torch.float64) if double else (tl.float32, torch.float32)
    # float16 has too few exponents for the weights: its products are taken in tf32, which has its mantissa.
    return Plan(
        d=d,
        slots=slots,
        C=C,
        NP=NP,
        BN=min(64, NP),
        BD=64 if half or NP <= 64 else 32,
        CT=tl.bfloat16 if half else exact,
        PREC="tf32" if dtype == torch.float16 else "ieee",
        half=half,
        fine=fine,
        paired=half and d == 32,
        one=half or double,
        state=torch.bfloat16 if half else kept,
        # What rounding does to sums is mended, but with very few slots all errors are larger.
        sums=torch.bfloat16 if half and slots > 16 else kept,
        weight=torch.bfloat16 if half else kept,
        warps=4 if NP <= 64 else 8,
        stages=2 if half else 1,
    )


@cache
def _doubles() -> bool:
    """Whether all GPUs here have tensor cores for float64; the interpreter needs none."""
    return all(torch.cuda.get_device_capability(i) in DOUBLES for i in range(torch.cuda.device_count()))


def _launch_of(plan: Plan, kernel: str, wide: bool) -> dict[str, Any]:
    """How a kernel is launched: its columns, warps, stages and registers."""
    settings: Settings = (plan.BD, plan.stages, None, plan.warps)
    if plan.half and wide:
        # Many programs at a time, since nearly all find that there is nothing to do.
        settings = plan.BD, 1, 128 if plan.NP <= 128 else None, plan.warps
    elif plan.half:
        case = kernel, 64 if kernel in ("write", "sum") else plan.NP
        settings = TUNED.get(case, settings)
        settings = NARROW.get(case, settings) if plan.d <= 64 else settings
        settings = FEW.get(case, settings) if plan.fine else settings
        settings = PAIRED.get(case, settings) if plan.paired else settings
    columns, stages, registers, warps = settings
    if triton.cdiv(plan.d, 64) % 2:
        # Half of the last columns would be padding.
        columns = min(columns, 64)
    return {
        "CT": plan.CT, "PREC": plan.PREC, "C": plan.C, "BD": columns, "WHOLE": plan.d % columns == 0,
        "num_warps": warps, "num_stages": stages, "maxnreg": registers,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def tiles(kernel: str, plan: Plan, form: Form, wide: bool, saved: bool = False) -> Options:
    """Constants of a kernel that takes a chunk by itself."""
    if kernel == "weigh":
        full = plan.slots == plan.NP and plan.half
        flags = {"EVEN": form.even, "FULL": full, "VARLEN": form.packed, "MASKED": form.masked}
        return tuple({"C": plan.C, "NP": plan.NP, **flags, "num_warps": plan.warps // 2}.items())
    # Kernels of their own for a number of slots only where they are worth their compilation.
    slots = plan.slots if plan.slots % 16 == 0 and plan.half else 0
    options = {
        **_launch_of(plan, kernel, wide), "NP": plan.NP, "CAUSAL": form.causal, "EVEN": form.even, "SLOTS": slots,
        "WIDE": wide, "VARLEN": form.packed, "MASKED": form.masked,
    }  # fmt: skip
    alone = plan.half and form.causal and not wide
    options["PAIR"] = plan.d if plan.paired and form.causal and not wide else 0
    if kernel == "key":
        sums = plan.half and (plan.sums == torch.float32 or not form.causal)
        one = plan.one and form.causal and not wide and plan.d <= options["BD"]
        options |= {"R": form.groups, "ONE": one and not options["PAIR"], "FINE": plan.fine, "SUMS": sums}
    else:
        sure = alone and form.even and not form.masked
        options |= {"SURE": sure, "FINE": plan.fine, "EARLY": _early(plan) if alone else 0}
        options["GROUPED"] = form.groups > 1 and not wide
    if kernel == "read":
        # Those of several references have no registers for it.
        options |= {"SAVED": saved, "EARLY": alone}
    if wide and plan.loose:
        # Made for whole chunks, dq of 200 slots came out wrong (Triton 3.6).
        options |= {"EVEN": False, "SLOTS": 0, "WHOLE": False}
    return tuple(options.items())


def _early(plan: Plan) -> int:
    """What ``query_gradients`` asks for before it needs it: logits (1), scores before logits (2) or at once (4)."""
    if plan.NP == 64:
        return 1 if 32 < plan.d <= 64 else 5
    return 2 if plan.NP == 128 else 0


def grid_of(options: Options, units: int, heads: int) -> tuple[int, int, int]:
    """The programs of a kernel that has one for each unit and query head."""
    return (units * heads, 1, 1) if dict(options)["GROUPED"] else (units, heads, 1)


@lru_cache(maxsize=4096)
def walks(kernel: str, plan: Plan, form: Form, rows: int, chunks: int) -> tuple[Walk, ...]:
    """The launches of a kernel that walks along sequences: one, or two where they are cut into segments.

    There are ``rows`` of them, sequences by heads, of ``chunks`` on average.
    """
    options = _launch_of(plan, kernel, False)
    paired = plan.paired and kernel == "write"
    parts = 2 * triton.cdiv(plan.d, options["BD"]) * triton.cdiv(plan.slots, plan.BN)
    if paired:
        parts //= 2
        options["BD"] = 2 * plan.d
    segments = segments_of(rows * parts, chunks)
    if plan.half and kernel == "write" and FIT < rows * parts * segments <= FIT_BY_LESS:
        options |= LESS
    options |= {
        "BN": plan.BN, "EVEN": form.even, "FULL": plan.slots % plan.BN == 0 and plan.half, "VARLEN": form.packed,
    }  # fmt: skip
    if kernel == "write":
        options |= {"MASKED": form.masked, "STARTED": form.started, "FINE": plan.fine and form.causal}
        options["PAIR"] = plan.d if paired else 0
    else:
        mend = form.causal and plan.sums == torch.bfloat16
        options |= {"R": form.groups, "DECAY": form.causal, "SEEDED": form.started, "MEND": mend}

    def walk(stage: str, share: int, join: bool, less: int = 0) -> Walk:
        given = {**options, "STAGE": stage, "JOIN": join, "LESS": less}
        return Walk(rows * parts * (share - less), segments, tuple(given.items()))

    if segments == 1:
        return (walk("keep" if form.causal else "whole", 1, False),)
    # The second pass stores what it meets, or only puts the parts together.
    second = walk("keep", segments, True) if form.causal else walk("join", 1, True)
    return walk("part", segments, False, int(form.causal)), second


def segments_of(programs: int, chunks: int) -> int:
    """Into how many segments sequences are cut: several where there are too few programs, each of 8 chunks or more."""
    return 1 if programs >= BUSY // 3 else max(1, min(triton.cdiv(BUSY, programs), chunks // 8))


def unit_count(batch: int, length: int, size: int, sequences: int | None) -> int:
    """How many units ``units_of`` makes."""
    if sequences is None:
        return batch * triton.cdiv(length, size)
    # At most one unit a sequence is not full; those that are not needed stay empty.
    return length // size + sequences


@lru_cache(maxsize=4096)
def _even_units(batch: int, length: int, size: int) -> Units:
    per_row = triton.cdiv(length, size)
    return Units(size, batch * per_row, per_row, batch, None, None)


def units_of(calls: Calls, batch: int, length: int, size: int, cu_seqlens: Tensor | None) -> Units:
    """The units of a batch of rows, or of packed sequences; no word from the device is waited for."""
    if cu_seqlens is None:
        return _even_units(batch, length, size)
    sequences = cu_seqlens.shape[0] - 1
    count = unit_count(batch, length, size, sequences)
    _, (table, bounds) = calls.several((((count, 3), torch.int32), ((sequences + 1,), torch.int32)))
    programs, options = _cutting(count, sequences)
    calls.launch(cut_units, (programs, 1, 1), (cu_seqlens, table, bounds), (count, sequences, size), options)
    return Units(size, count, count, sequences, table, bounds)


@lru_cache(maxsize=4096)
def _cutting(count: int, sequences: int) -> tuple[int, Options]:
    options = {"UNITS": 32, "BLOCK": min(1024, triton.next_power_of_2(sequences)), "num_warps": 4}
    return triton.cdiv(count, 32), tuple(options.items())
