"""A map as few bytes: 8 bits with a scale per head, or half precision, deflated; and its thumbnail."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass

import numpy as np

__all__ = ["Coded", "encode", "pooled", "squeeze"]

# A byte counts steps of a head's scale: from 0 to 254, or from -127 to 127 around 127 where a reading has a sign.
# 255 stands for NaN and infinity.
LEVELS, MIDDLE, NOT_A_NUMBER = 254, 127, 255


@dataclass(frozen=True)
class Coded:
    """Some heads: the bytes of each, its scale (0 in half precision), and how many weights are NaN or infinite."""

    heads: tuple[bytes, ...]
    scales: tuple[float, ...]
    missing: int


def encode(maps: np.ndarray, *, signed: bool, precise: bool) -> Coded:
    """Code maps (head, query, key).

    >>> coded = encode(np.array([[[1.0, 0.0], [0.25, 0.75]]]), signed=False, precise=False)
    >>> list(coded.heads[0]), coded.scales[0] * 254
    ([254, 0, 64, 191], 1.0)
    """
    with np.errstate(invalid="ignore", over="ignore"):
        parts = [_half(w) if precise else _bytes(w, signed) for w in maps]
    heads, scales, missing = zip(*parts, strict=True)
    return Coded(heads, scales, sum(missing))


def squeeze(raw: bytes) -> bytes:
    """Deflated, as base64 (the text of a page).

    >>> zlib.decompress(base64.b64decode(squeeze(b"attention")))
    b'attention'
    """
    # Weights are noise with runs of zeros: run lengths and Huffman codes compress them as well as a search for
    # matches would, in a fraction of the time.
    packer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    return base64.b64encode(packer.compress(raw) + packer.flush())


def pooled(maps: np.ndarray, size: int) -> np.ndarray:
    """Maps of at most ``size`` x ``size`` cells: the mean weight that a block of queries gives to a block of keys.

    Weights are summed over the keys of a block and averaged over its queries, so rows still sum to one and the
    thumbnail of a difference is the difference of the thumbnails.

    >>> pooled(np.eye(4)[None], 2)[0].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    _, queries, keys = maps.shape
    if queries > size:
        rows = _blocks(queries, size)
        maps = (rows / rows.sum(1, keepdims=True)).astype(maps.dtype) @ maps
    if keys > size:
        maps = maps @ _blocks(keys, size).T.astype(maps.dtype)
    return maps


def _blocks(length: int, size: int) -> np.ndarray:
    """(block, position): which block each position falls into."""
    return np.arange(size)[:, None] == np.arange(length) * size // length


def _bytes(w: np.ndarray, signed: bool) -> tuple[bytes, float, int]:
    finite = np.isfinite(w)
    whole = bool(finite.all())
    kept = w if whole else np.where(finite, w, 0)
    top = max(float(kept.max(initial=0.0)), -float(kept.min(initial=0.0)) if signed else 0.0)
    scale = top / (MIDDLE if signed else LEVELS)
    # Adding half a step and cutting off the fraction rounds, in one pass.
    steps = kept * w.dtype.type(1 / scale if scale > 0 else 0)
    steps += (MIDDLE if signed else 0) + 0.5
    coded = steps.astype(np.uint8)
    if not whole:
        coded[~finite] = NOT_A_NUMBER
    return coded.tobytes(), scale, 0 if whole else int((~finite).sum())


def _half(w: np.ndarray) -> tuple[bytes, float, int]:
    halves = w.astype("<f2").view(np.uint8).reshape(-1, 2)
    # All low bytes, then all high bytes: the high ones resemble each other, so they compress well.
    return halves.T.tobytes(), 0.0, int((~np.isfinite(w)).sum())
