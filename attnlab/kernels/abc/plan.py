"""How a call is cut into chunks, tiles and segments, which dtypes it takes, and the constants of each kernel.

What each constant means to a kernel is said in the kernel's docstring; their groups are listed in the package's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.kernels.abc.packing import cut_sequences
from attnlab.kernels.abc.recorded_calls import CallRecorder
from attnlab.kernels.launching import Options

__all__ = [
    "CallForm",
    "Chunks",
    "TilePlan",
    "Walk",
    "chunk_count",
    "cut_into_chunks",
    "grid_of",
    "key_options",
    "plan_for",
    "query_options",
    "read_options",
    "segments_of",
    "sum_walks",
    "weigh_options",
    "write_walks",
]

# Columns at a time, stages, registers a thread may take, and warps, for bf16 and slots up to 64 or 128; measured on an
# H200. Kernels that walk along sequences take 64 slots at a time.
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
# In place of these: for heads of up to 64, for states with low parts, and for heads with keys and values in one tile.
NARROW: dict[tuple[str, int], Settings] = {("key", 64): (64, 1, 168, 4)}
FEW: dict[tuple[str, int], Settings] = {("read", 64): (64, 2, 168, 4)}
PAIRED: dict[tuple[str, int], Settings] = {("read", 64): (64, 1, 128, 4), ("query", 64): (64, 1, None, 4)}
# Programs that keep the card busy: two on nearly every multiprocessor, and never a third on a few.
BUSY = 256
# Programs of ``write_states`` that are on the card at once: with its settings, and with fewer stages and registers.
FIT, FIT_BY_LESS, FEWER = 396, 528, {"num_stages": 3, "maxnreg": 128}

# Where a few keys fill all slots, the logits' gradient is a difference of sums over all later queries that cancel, and
# float32 leaves 250 times its rounding. From these numbers of slots on, bf16 has products of bf16, and float32 its own;
# with fewer, bf16 has those of float32, and float32 those of float64, which tensor cores make faster, too.
HALF_FROM, SINGLE_FROM = 8, 33
# Compute capabilities of GPUs with float64 tensor cores (measured on 9.0; for the others the kernels compile).
DOUBLES = ((8, 0), (9, 0), (10, 0))
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Tiles and dtypes for a head size, a number of slots and a dtype; beside each the kernels' name for it."""

    # D, N
    d: int
    slots: int
    # C: tokens of a chunk
    chunk: int
    # NP: slots with padding; BN: slots of a tile, in kernels that walk along sequences
    padded_slots: int
    slot_tile: int
    # BD: columns of a tile, where there are no settings of its own
    column_tile: int
    # CT and PREC: what matrix products are taken of, and in
    dot_dtype: tl.dtype
    precision: str
    # LOW_PARTS: states and products have a second part for what rounding takes
    low_parts: bool
    # keys and values of a head share one tile (PAIR_WIDTH)
    paired: bool
    # there are registers for key gradients of ALL_COLUMNS
    all_columns: bool
    # what states, sums over queries and weights of logits are stored in
    state_dtype: torch.dtype
    sums_dtype: torch.dtype
    weight_dtype: torch.dtype
    warps: int
    stages: int

    @cached_property
    def bf16(self) -> bool:
        """Whether products are of bfloat16."""
        return bool(self.dot_dtype == tl.bfloat16)

    @cached_property
    def full_dtype(self) -> torch.dtype:
        """What sums of products, scores and logarithms are kept in."""
        return torch.float64 if self.dot_dtype == tl.float64 else torch.float32

    @cached_property
    def generic(self) -> bool:
        """Whether wide chunks take kernels that are not specialised to their strides and number of slots."""
        return self.bf16 and self.padded_slots > 128


@dataclass(frozen=True)
class CallForm:
    """The properties of a call for which kernels are compiled: ``groups`` is the query heads of a key head."""

    causal: bool
    # every chunk has all its tokens
    full_chunks: bool
    packed: bool
    masked: bool
    # there is a first state (or, backward, a gradient of the last)
    started: bool = False
    groups: int = 1


@dataclass(frozen=True)
class Chunks:
    """Tokens cut into ``count`` chunks of at most ``size``, ``per_row`` in a row unless they are packed.

    ``table`` and ``bounds``, of packed sequences, are as ``cut_sequences`` writes them.
    """

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
def plan_for(d: int, slots: int, dtype: torch.dtype, train: bool) -> TilePlan:
    """Tiles that fit the registers and shared memory for this head size and number of slots."""
    products = _product_dtype(slots, dtype)
    bf16, full = products == torch.bfloat16, torch.float32 if products == torch.bfloat16 else products
    # Products with fewer than 64 rows or columns come out wrong on Hopper in bf16 (Triton 3.6).
    padded = max(16 if products == torch.float64 else 64, triton.next_power_of_2(slots))
    return TilePlan(
        d=d,
        slots=slots,
        chunk=_chunk_tokens(padded, bf16),
        padded_slots=padded,
        slot_tile=min(64, padded),
        column_tile=64 if bf16 or padded <= 64 else 32,
        dot_dtype=TRITON_DTYPES[products],
        # float16 has too few exponents for the weights: its products are taken in tf32, which has its mantissa.
        precision="tf32" if dtype == torch.float16 else "ieee",
        # Few slots are often filled by one key each, and then bf16 states are too coarse for the logits' gradient. With
        # more slots the low parts would take too much room.
        low_parts=bf16 and slots <= 32 and train,
        paired=bf16 and d == 32,
        all_columns=products != torch.float32,
        state_dtype=products,
        # The rounding of sums is corrected, but with very few slots all errors are larger.
        sums_dtype=torch.bfloat16 if bf16 and slots > 16 else full,
        weight_dtype=products,
        warps=4 if padded <= 64 else 8,
        stages=2 if bf16 else 1,
    )


def _product_dtype(slots: int, dtype: torch.dtype) -> torch.dtype:
    """What matrix products are taken of; float16 is computed in float32."""
    if dtype == torch.bfloat16 and slots >= HALF_FROM:
        return torch.bfloat16
    return torch.float64 if dtype == torch.float32 and slots < SINGLE_FROM and _doubles() else torch.float32


def _chunk_tokens(padded_slots: int, bf16: bool) -> int:
    if bf16:
        return 64 if padded_slots <= 128 else 32
    return 32 if padded_slots <= 64 else 16


@cache
def _doubles() -> bool:
    """Whether all GPUs of this machine have float64 tensor cores; the interpreter needs none."""
    return all(torch.cuda.get_device_capability(i) in DOUBLES for i in range(torch.cuda.device_count()))


def _launch_options(plan: TilePlan, kernel: str, wide: bool) -> dict[str, Any]:
    """The options that all kernels have: tokens and columns of a tile, dtypes, warps, stages and registers."""
    settings: Settings = (plan.column_tile, plan.stages, None, plan.warps)
    if plan.bf16 and wide:
        # Room for many programs at a time: nearly all find that their chunk is not wide, and end.
        settings = plan.column_tile, 1, 128 if plan.padded_slots <= 128 else None, plan.warps
    elif plan.bf16:
        case = kernel, 64 if kernel in ("write", "sum") else plan.padded_slots
        settings = TUNED.get(case, settings)
        settings = NARROW.get(case, settings) if plan.d <= 64 else settings
        settings = FEW.get(case, settings) if plan.low_parts else settings
        settings = PAIRED.get(case, settings) if plan.paired else settings
    columns, stages, registers, warps = settings
    if triton.cdiv(plan.d, 64) % 2:
        # Half of the last columns would be padding.
        columns = min(columns, 64)
    return {
        "CT": plan.dot_dtype, "PREC": plan.precision, "C": plan.chunk, "BD": columns,
        "FULL_COLUMNS": plan.d % columns == 0, "num_warps": warps, "num_stages": stages, "maxnreg": registers,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def weigh_options(plan: TilePlan, form: CallForm) -> Options:
    """Constants of ``weigh_logits``."""
    full_slots = plan.slots == plan.padded_slots and plan.bf16
    options = {
        "C": plan.chunk, "NP": plan.padded_slots, "FULL_CHUNKS": form.full_chunks, "FULL_SLOTS": full_slots,
        "PACKED": form.packed, "MASKED": form.masked, "num_warps": plan.warps // 2,
    }  # fmt: skip
    return tuple(options.items())


@lru_cache(maxsize=4096)
def read_options(plan: TilePlan, form: CallForm, wide: bool, save_scores: bool) -> Options:
    """Constants of ``read_states``."""
    options = _query_side_options("read", plan, form, wide)
    # Wide chunks have no registers to load logits early.
    options |= {"SAVE_SCORES": save_scores, "EARLY_LOGITS": plan.bf16 and form.causal and not wide}
    return tuple(options.items())


@lru_cache(maxsize=4096)
def query_options(plan: TilePlan, form: CallForm, wide: bool) -> Options:
    """Constants of ``query_gradients``."""
    options = _query_side_options("query", plan, form, wide)
    tuned, slots = plan.bf16 and form.causal and not wide, plan.padded_slots
    options |= {
        "EARLY_LOGITS": tuned and slots == 64,
        "EARLY_SCORES": tuned and slots == 64 and not 32 < plan.d <= 64,
        "SCORES_WITH_LOGITS": tuned and slots == 128,
    }
    return tuple(options.items())


@lru_cache(maxsize=4096)
def key_options(plan: TilePlan, form: CallForm, wide: bool) -> Options:
    """Constants of ``key_gradients``."""
    options = _chunk_options("key", plan, form, wide)
    one_tile = form.causal and not wide and plan.d <= options["BD"] and not options["PAIR_WIDTH"]
    options |= {
        "R": form.groups,
        "ALL_COLUMNS": plan.all_columns and one_tile,
        "SUMS_IN_FULL": plan.bf16 and (plan.sums_dtype == torch.float32 or not form.causal),
    }
    return tuple(options.items())


def _query_side_options(kernel: str, plan: TilePlan, form: CallForm, wide: bool) -> dict[str, Any]:
    """Options of the two kernels that have a program for each chunk and query head."""
    options = _chunk_options(kernel, plan, form, wide)
    all_written = plan.bf16 and form.causal and not wide and form.full_chunks and not form.masked
    return options | {"ALL_WRITTEN": all_written, "GROUPED": form.groups > 1 and not wide}


def _chunk_options(kernel: str, plan: TilePlan, form: CallForm, wide: bool) -> dict[str, Any]:
    """Options of all kernels that take a chunk by itself and read or give gradients."""
    # Kernels of their own for a number of slots only where they are worth their compilation.
    slots = plan.slots if plan.slots % 16 == 0 and plan.bf16 else 0
    options = {
        **_launch_options(plan, kernel, wide), "NP": plan.padded_slots, "CAUSAL": form.causal,
        "FULL_CHUNKS": form.full_chunks, "SLOTS": slots, "WIDE": wide, "PACKED": form.packed, "MASKED": form.masked,
        "PAIR_WIDTH": plan.d if plan.paired and form.causal and not wide else 0, "LOW_PARTS": plan.low_parts,
    }  # fmt: skip
    if wide and plan.generic:
        # Made for full chunks, dq of 200 slots came out wrong (Triton 3.6).
        options |= {"FULL_CHUNKS": False, "SLOTS": 0, "FULL_COLUMNS": False}
    return options


def grid_of(options: Options, chunks: int, heads: int) -> tuple[int, int, int]:
    """The programs of a kernel that has one for each chunk and query head."""
    return (chunks * heads, 1, 1) if dict(options)["GROUPED"] else (chunks, heads, 1)


@lru_cache(maxsize=4096)
def write_walks(plan: TilePlan, form: CallForm, rows: int, chunks: int) -> tuple[Walk, ...]:
    """The launches of ``write_states``: one, or two where sequences are cut into segments.

    There are ``rows`` of them, sequences by key heads, of ``chunks`` on average.
    """
    options = _launch_options(plan, "write", False)
    tiles = _tiles_of_a_row(plan, options)
    if plan.paired:
        tiles //= 2
        options["BD"] = 2 * plan.d
    segments = segments_of(rows * tiles, chunks)
    if plan.bf16 and FIT < rows * tiles * segments <= FIT_BY_LESS:
        options |= FEWER
    options |= {
        "MASKED": form.masked, "STARTED": form.started, "LOW_PARTS": plan.low_parts and form.causal,
        "PAIR_WIDTH": plan.d if plan.paired else 0,
    }  # fmt: skip
    return _passes(plan, form, options, rows * tiles, segments)


@lru_cache(maxsize=4096)
def sum_walks(plan: TilePlan, form: CallForm, rows: int, chunks: int) -> tuple[Walk, ...]:
    """The launches of ``sum_back``, as ``write_walks`` has those of ``write_states``."""
    options = _launch_options(plan, "sum", False)
    tiles = _tiles_of_a_row(plan, options)
    correct = form.causal and plan.sums_dtype == torch.bfloat16
    options |= {"R": form.groups, "DECAY": form.causal, "SEEDED": form.started, "CORRECT_SUMS": correct}
    return _passes(plan, form, options, rows * tiles, segments_of(rows * tiles, chunks))


def _tiles_of_a_row(plan: TilePlan, options: dict[str, Any]) -> int:
    """Tiles of K~ and V~ of one sequence and key head."""
    return 2 * triton.cdiv(plan.d, options["BD"]) * triton.cdiv(plan.slots, plan.slot_tile)


def _passes(
    plan: TilePlan, form: CallForm, options: dict[str, Any], programs: int, segments: int
) -> tuple[Walk, ...]:  # fmt: skip
    """One launch with these options for ``programs`` tiles, or two over their segments; stages as in ``state``."""
    full_slots = plan.slots % plan.slot_tile == 0 and plan.bf16
    options = {
        **options, "BN": plan.slot_tile, "FULL_CHUNKS": form.full_chunks, "FULL_SLOTS": full_slots,
        "PACKED": form.packed,
    }  # fmt: skip

    def walk(stage: str, each: int, join: bool, skipped: int = 0) -> Walk:
        constants = {**options, "STAGE": stage, "JOIN_SEGMENTS": join, "SKIPPED": skipped}
        return Walk(programs * (each - skipped), segments, tuple(constants.items()))

    if segments == 1:
        return (walk("keep" if form.causal else "whole", 1, False),)
    # The second pass stores what there is at each chunk, or only joins the segments' totals.
    second = walk("keep", segments, True) if form.causal else walk("join", 1, True)
    return walk("part", segments, False, int(form.causal)), second


def segments_of(programs: int, chunks: int) -> int:
    """Into how many segments sequences are cut: several where there are too few programs, each of 8 chunks or more."""
    return 1 if programs >= BUSY // 3 else max(1, min(triton.cdiv(BUSY, programs), chunks // 8))


def chunk_count(batch: int, length: int, size: int, sequences: int | None) -> int:
    """How many chunks ``cut_into_chunks`` makes."""
    if sequences is None:
        return batch * triton.cdiv(length, size)
    # At most one chunk of a sequence is not full; those that are not needed stay empty.
    return length // size + sequences


@lru_cache(maxsize=4096)
def _even_chunks(batch: int, length: int, size: int) -> Chunks:
    per_row = triton.cdiv(length, size)
    return Chunks(size, batch * per_row, per_row, batch, None, None)


def cut_into_chunks(recorder: CallRecorder, batch: int, length: int, size: int, cu_seqlens: Tensor | None) -> Chunks:
    """The chunks of a batch of rows, or of packed sequences; these are cut on the device, without waiting for it."""
    if cu_seqlens is None:
        return _even_chunks(batch, length, size)
    sequences = cu_seqlens.shape[0] - 1
    count = chunk_count(batch, length, size, sequences)
    tables = recorder.empties({"table": ((count, 3), torch.int32), "bounds": ((sequences + 1,), torch.int32)})
    programs, options = _cutting(count, sequences)
    recorder.launch(
        cut_sequences,
        (programs, 1, 1),
        {"cu": cu_seqlens, **tables},
        {"COUNT": count, "SEQUENCES": sequences, "SIZE": size},
        options,
    )
    return Chunks(size, count, count, sequences, tables["table"], tables["bounds"])


@lru_cache(maxsize=4096)
def _cutting(count: int, sequences: int) -> tuple[int, Options]:
    options = {"CHUNKS": 32, "BLOCK": min(1024, triton.next_power_of_2(sequences)), "num_warps": 4}
    return triton.cdiv(count, 32), tuple(options.items())
