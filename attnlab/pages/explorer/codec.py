"""A map as few bytes: 8 bits with a scale per head, or half precision, deflated; and its thumbnail.

Numbers are stored key by key, since what queries give to one key is alike; of a causal map those below the diagonal.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Coded", "encode", "is_causal", "pooled", "squeeze"]

# A byte counts steps of a head's scale: from 0 to 254, or from -127 to 127 around 127 where a reading has a sign.
# 255 stands for NaN and infinity.
LEVELS, MIDDLE, NOT_A_NUMBER = 254, 127, 255


@dataclass(frozen=True)
class Coded:
    """Some heads: the bytes of each, its scale (0 in half precision), and how many weights are NaN or infinite."""

    heads: tuple[bytes, ...]
    scales: tuple[float, ...]
    missing: int


def encode(maps: np.ndarray, *, signed: bool, precise: bool, causal: bool = False) -> Coded:
    """Code maps (head, query, key), in which no query looks ahead if ``causal``.

    >>> coded = encode(np.array([[[1.0, 0.0], [0.25, 0.75]]]), signed=False, precise=False)
    >>> list(coded.heads[0]), coded.scales[0] * 254
    ([254, 64, 0, 191], 1.0)
    """
    with np.errstate(invalid="ignore", over="ignore"):
        parts = [_half(w, causal) if precise else _bytes(w, signed, causal) for w in maps]
    heads, scales, missing = zip(*parts, strict=True)
    return Coded(heads, scales, sum(missing))


def is_causal(maps: np.ndarray) -> bool:
    """Whether all weights above the diagonal of square maps (head, query, key) are zero."""
    _, queries, keys = maps.shape
    return queries == keys and not any(np.triu(w, 1).any() for w in maps)


def squeeze(raw: bytes, as_text: Callable[[bytes], bytes] = base64.b64encode) -> tuple[bytes, bool]:
    """(deflated, as the text of a page; whether each byte is stored as its difference to the one before it).

    >>> stream, differences = squeeze(b"attention")
    >>> zlib.decompress(base64.b64decode(stream)), differences
    (b'attention', False)
    """
    # Weights are noise with runs of zeros: run lengths and Huffman codes compress them as well as a search for
    # matches would, in a fraction of the time. Some readings have no zeros, but neighbours that are alike.
    changes = np.diff(np.frombuffer(raw, np.uint8), prepend=np.uint8(0)).tobytes()
    plain, changed = _deflated(raw, zlib.Z_RLE), _deflated(changes, zlib.Z_HUFFMAN_ONLY)
    return as_text(min(plain, changed, key=len)), len(changed) < len(plain)


def _deflated(raw: bytes, strategy: int) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, strategy)
    return packer.compress(raw) + packer.flush()


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


def _bytes(w: np.ndarray, signed: bool, causal: bool) -> tuple[bytes, float, int]:
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
    return _key_by_key(coded, causal).tobytes(), scale, 0 if whole else int((~finite).sum())


def _half(w: np.ndarray, causal: bool) -> tuple[bytes, float, int]:
    halves = _key_by_key(w.astype("<f2"), causal).view(np.uint8).reshape(-1, 2)
    # All low bytes, then all high bytes: the high ones resemble each other, so they compress well.
    return halves.T.tobytes(), 0.0, int((~np.isfinite(w)).sum())


def _key_by_key(w: np.ndarray, causal: bool) -> np.ndarray:
    """The numbers of a map (query, key), those of a key together; in a causal map those of its own query and later."""
    return w.T[_own_and_later(len(w))] if causal else w.T.ravel()


@functools.lru_cache(4)
def _own_and_later(length: int) -> np.ndarray:
    return np.triu(np.ones((length, length), dtype=bool))
