"""One decoding step over keys without padding, each head with a number of its own; and one more key of each."""

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
# The programs that a launch should have at least: several for each multiprocessor of a large GPU.
PROGRAMS = 1024
LONGEST_SPAN = 2048
# Parts that one program of ``combine_parts`` reads at once.
PARTS_AT_ONCE = 32


class Tiles(NamedTuple):
    """Keys that a program reads at a time and in all, and how it is compiled."""

    keys: int
    span: int
    warps: int = 4
    stages: int = 3


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
    """softmax(scale q k^T + bias) v of one query a head, (b, h, 1, e).

    ``keys`` (places, d) and ``values`` (places, e) hold key/value head g of row r, segment s = r * heads + g, at the
    places from starts[s] on, counts[s] of them (int32). ``longest`` is the largest count and ``total`` their sum, which
    the host knows. ``bias`` (places,) is float32; minus infinity hides a key. ``visible`` (b, n) says which columns of
    the text each row's query sees, and ``columns`` (places,), int32, the column of each key; without them key i of a
    segment is column i. No key is repeated for its query heads. It has no gradients.
    """
    (b, h, _, d), e = q.shape, values.shape[-1]
    segments = starts.numel()
    g, r = segments // b, h * b // segments
    if tiles is None:
        tiles = tiles_for(d, e, keys.element_size(), total)
    parts = max(1, triton.cdiv(longest, tiles.span))
    q = q if q.stride(3) == 1 else q.contiguous()
    visible = visible if visible is None or visible.stride(1) == 1 else visible.contiguous()
    out = torch.empty(b, h, 1, e, dtype=q.dtype, device=q.device)
    whole = parts == 1
    part_o, part_top, part_sum = (
        None if whole else torch.empty(segments, parts, r, *columns, dtype=torch.float32, device=q.device)
        for columns in ((e,), (), ())
    )
    (sqb, sqh, _, _), (sob, soh, _, _) = q.stride(), out.stride()
    launch(
        read_part,
        (segments, parts, 1),
        {
            "q": q, "keys": keys, "values": values, "bias": bias, "columns": None if visible is None else columns,
            "visible": visible, "starts": starts, "counts": counts, "o": out, "part_o": part_o, "part_top": part_top,
            "part_sum": part_sum,
        },
        {
            "sqb": sqb, "sqh": sqh, "sob": sob, "soh": soh, "svb": 0 if visible is None else visible.stride(0), "G": g,
            "PARTS": parts, "scale": scale,
        },
        _read_options(r, d, e, tiles, bias is not None, visible is not None, columns is not None, whole, q.dtype),
    )  # fmt: skip
    if not whole:
        launch(
            combine_parts,
            (segments, r, 1),
            {"part_o": part_o, "part_top": part_top, "part_sum": part_sum, "counts": counts, "o": out},
            {"sob": sob, "soh": soh, "G": g, "PARTS": parts},
            _combine_options(r, e, tiles.span),
        )
    return out


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
def tiles_for(d: int, e: int, itemsize: int, total: int) -> Tiles:
    """Tiles of about ``TILE_BYTES``, and spans that make work for ``PROGRAMS`` programs."""
    width = triton.next_power_of_2(max(d, e, 16))
    tile = min(128, max(16, TILE_BYTES // (width * itemsize)))
    span = triton.next_power_of_2(max(1, total // PROGRAMS + 1)) // 2
    return Tiles(tile, min(LONGEST_SPAN, max(tile, span)))


@lru_cache(maxsize=1024)
def _read_options(
    r: int, d: int, e: int, tiles: Tiles, biased: bool, masked: bool, columns: bool, whole: bool, dtype: torch.dtype
) -> Options:
    """Constants of ``read_part``."""
    # A product of tiles needs 16 rows and columns.
    padded_heads, key_width, value_width = (max(16, triton.next_power_of_2(size)) for size in (r, d, e))
    return tuple(
        {
            "R": r, "RP": padded_heads, "D": d, "BD": key_width, "E": e, "BE": value_width, "BN": tiles.keys,
            "SPAN": tiles.span, "BIASED": biased, "MASKED": masked, "COLUMNS": masked and columns, "WHOLE": whole,
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
