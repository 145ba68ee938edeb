"""New tokens over keys without padding, each head with a number of its own; and one more key of each."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.kernels.launching import Options, launch
from attnlab.kernels.ragged_triton import append_token, combine_parts, read_part

__all__ = ["Tiles", "append", "ragged_attention", "serves", "tiles_for"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
# Bytes of a tile of keys.
TILE_BYTES = 16384
# Of several queries: rows (query heads of one key head times queries) that a program has and keys that it reads at a
# time, at most, and the bytes of its rows. More do not fit into the registers.
MOST_ROWS, MOST_KEYS, ROW_BYTES = 64, 64, 16384
# The programs that a launch should have at least: several for each multiprocessor of a large GPU.
PROGRAMS = 1024
LONGEST_SPAN = 2048
# Parts that one program of ``combine_parts`` reads at once.
PARTS_AT_ONCE = 32
# What the queries of a row see: every key so far, the same columns, or columns of their own.
ALL, ALIKE, EACH = range(3)


class Tiles(NamedTuple):
    """Keys that a program reads at a time and in all, how it is compiled, and its rows: query heads times queries."""

    keys: int
    span: int
    warps: int = 4
    stages: int = 3
    # As many as one query needs, where there is one.
    rows: int = 16


def ragged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    counts: Tensor,
    *,
    scale: float,
    longest: int,
    total: int,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    columns: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v of the last tokens, (b, h, n, e), none of which sees the key of a later one.

    ``keys`` (places, d) and ``values`` (places, e) hold key/value head g of row r, segment s = r * heads + g, at the
    places from starts[s] on, counts[s] of them (int32), the last n of which are those of the queries. ``longest`` is
    the largest count and ``total`` their sum, which the host knows. ``bias`` (places,) is float32; minus infinity hides
    a key. ``visible`` (b, n or 1, m) says which columns of the text each query sees, and ``columns`` (places,), int32,
    the column of each key; without them key i of a segment is column i. No key is repeated for its query heads. It has
    no gradients.
    """
    (b, h, n, d), e = q.shape, values.shape[-1]
    segments = starts.numel()
    g, r = segments // b, h * b // segments
    if tiles is None:
        tiles = tiles_for(d, e, keys.element_size(), total, n * r if n > 1 else 1)
    blocks = triton.cdiv(n * r, tiles.rows) if n > 1 else 1
    parts = max(1, triton.cdiv(longest, tiles.span))
    q = q if q.stride(3) == 1 else q.contiguous()
    visible = visible if visible is None or visible.stride(2) == 1 else visible.contiguous()
    out = torch.empty(b, h, n, e, dtype=q.dtype, device=q.device)
    whole, shown = parts == 1, _shown(visible)
    part_o, part_top, part_sum = (
        None if whole else torch.empty(segments, parts, n * r, *columns, dtype=torch.float32, device=q.device)
        for columns in ((e,), (), ())
    )
    strides = {"sob": out.stride(0), "soh": out.stride(1), "sot": out.stride(2) if n > 1 else 0}
    numbers = {"G": g, "N": n, "PARTS": parts}
    launch(
        read_part,
        (segments, parts, blocks),
        {
            "q": q, "keys": keys, "values": values, "bias": bias, "columns": None if visible is None else columns,
            "visible": visible, "starts": starts, "counts": counts, "o": out, "part_o": part_o, "part_top": part_top,
            "part_sum": part_sum,
        },
        {
            "sqb": q.stride(0), "sqh": q.stride(1), "sqt": q.stride(2) if n > 1 else 0, **strides,
            "svb": 0 if visible is None else visible.stride(0),
            "svt": visible.stride(1) if visible is not None and shown == EACH else 0, **numbers, "scale": scale,
        },
        _read_options(r, d, e, tiles, n > 1, bias is not None, shown, columns is not None, whole, q.dtype),
    )  # fmt: skip
    if not whole:
        launch(
            combine_parts,
            (segments, r, n),
            {"part_o": part_o, "part_top": part_top, "part_sum": part_sum, "counts": counts, "o": out},
            {**strides, **numbers},
            _combine_options(r, e, tiles.span),
        )
    return out


def _shown(visible: Tensor | None) -> int:
    """How the kernel is told what is visible: not at all, alike for all queries of a row, or for each."""
    if visible is None:
        return ALL
    return ALIKE if visible.shape[1] == 1 or visible.stride(1) == 0 else EACH


def append(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, counts: Tensor) -> None:
    """Write one token's key and value, (b, g, 1, d) and (b, g, 1, e), behind the last of each head, in one launch.

    ``keys`` and ``values`` are (b, g, room, d) and (b, g, room, e), of which ``counts`` (b g,), int32, says how many
    places are taken: it counts one more. A token for which there is no room makes all that is read from then on NaN.
    """
    (b, g, room, d), e = keys.shape, values.shape[-1]
    k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (k, v))
    launch(
        append_token,
        (b * g, 1, 1),
        {"k": k, "v": v, "keys": keys, "values": values, "counts": counts},
        {
            "skb": k.stride(0), "skh": k.stride(1), "svb": v.stride(0), "svh": v.stride(1), "G": g, "room": room,
        },
        _append_options(d, e),
    )  # fmt: skip


def serves(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether ``ragged_attention`` is made for these."""
    narrow = max(keys.shape[-1], values.shape[-1]) <= WIDEST
    contiguous = keys.is_contiguous() and values.is_contiguous()
    return narrow and contiguous and q.dtype in DTYPES and keys.dtype == q.dtype == values.dtype


@lru_cache(maxsize=1024)
def tiles_for(d: int, e: int, itemsize: int, total: int, rows: int = 1) -> Tiles:
    """Tiles of about ``TILE_BYTES``, and spans that make work for ``PROGRAMS`` programs.

    ``rows`` are query heads of a key head times queries, where there are several queries: a span then has no longest
    length, for the parts of all queries would take too much memory.
    """
    width = triton.next_power_of_2(max(d, e, 16))
    tile = min(128, max(16, TILE_BYTES // (width * itemsize)))
    if rows == 1:
        span = triton.next_power_of_2(max(1, total // PROGRAMS + 1)) // 2
        return Tiles(tile, min(LONGEST_SPAN, max(tile, span)))
    padded = min(MOST_ROWS, max(16, ROW_BYTES // (width * itemsize)), triton.next_power_of_2(max(16, rows)))
    span, tile = triton.next_power_of_2(max(1, total * triton.cdiv(rows, padded) // PROGRAMS)), min(MOST_KEYS, tile)
    return Tiles(tile, max(tile, span), rows=padded)


@lru_cache(maxsize=1024)
def _read_options(
    r: int, d: int, e: int, tiles: Tiles, many: bool, biased: bool, shown: int, columns: bool, whole: bool,
    dtype: torch.dtype,
) -> Options:  # fmt: skip
    """Constants of ``read_part``."""
    # A product of tiles needs 16 rows and columns.
    padded_heads, key_width, value_width = (max(16, triton.next_power_of_2(size)) for size in (r, d, e))
    return tuple(
        {
            "R": r, "RP": tiles.rows if many else padded_heads, "D": d, "BD": key_width, "E": e, "BE": value_width,
            "BN": tiles.keys, "SPAN": tiles.span, "MANY": many, "BIASED": biased, "MASKED": shown != ALL,
            "EACH": shown == EACH, "COLUMNS": shown != ALL and columns, "WHOLE": whole,
            # Three products on tensor cores keep the digits of float32.
            "PREC": "tf32x3" if dtype == torch.float32 else "tf32",
            "num_warps": tiles.warps, "num_stages": tiles.stages,
        }.items()
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _combine_options(r: int, e: int, span: int) -> Options:
    """Constants of ``combine_parts``."""
    return tuple(
        {
            "R": r, "E": e, "BE": triton.next_power_of_2(e), "BP": PARTS_AT_ONCE, "SPAN": span, "num_warps": 4,
        }.items()
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _append_options(d: int, e: int) -> Options:
    """Constants of ``append_token``."""
    widths = {"D": d, "BD": triton.next_power_of_2(d), "E": e, "BE": triton.next_power_of_2(e)}
    return tuple({**widths, "num_warps": 1}.items())
