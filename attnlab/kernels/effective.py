"""Effective attention of many heads in three kernels, where all queries of an input see the same keys.

The first attends as eager attention does and keeps W, in one launch where eager attention has eight. In the second a
program for each head makes the Gram matrix of its values, inverts its Cholesky factor in registers and writes an
orthonormal basis, all in float64. The third projects W on that basis, and takes the residual of W_perp V = O and the
share of W that is removed on the way. The host never waits for the device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from attnlab.kernels.effective_triton import attend, basis, project
from attnlab.kernels.launching import Numbers, Options, Tensors, launch
from attnlab.shapes import Float, Int

__all__ = ["WIDEST", "attend_heads", "project_heads"]

# Columns of V that the factorisation holds in registers.
WIDEST = 64
# Rows of a tile of attention, its warps, and the most keys of one that holds them all.
ATTENTION = (32, 4, 128)
# Keys of a tile and warps of the basis.
BASIS = (16, 2)
# Keys of a tile and stages of the projection, rows and warps for few and for many rows.
PROJECTION = (64, 1, (64, 4), (128, 8))


def attend_heads(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b h k d"],
    value: Float[Tensor, "b h k e"],
    seen: Int[Tensor, "b k"] | None,
    scale: float,
    w: Float[Tensor, "n q k"],
    values: Float[Tensor, "n k e"],
    output: Float[Tensor, "b q h e"],
) -> None:
    """Softmax attention to the keys that are ``seen`` (1); W, V and W V are left in the last three arguments."""
    b, h, n_q, d = query.shape
    n_k, e = value.shape[2:]
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    rows, *_ = ATTENTION
    tensors: Tensors = {
        "Q": query, "K": key, "V": value, "Seen": w if seen is None else seen, "W": w, "Values": values,
        "Output": output,
    }  # fmt: skip
    (qb, qh, qn, _), (kb, kh, kn, _), (vb, vh, vn, _) = query.stride(), key.stride(), value.stride()
    numbers: Numbers = {
        "heads": h, "n_q": n_q, "n_k": n_k, "d": d, "e": e, "qb": qb, "qh": qh, "qn": qn, "kb": kb, "kh": kh, "kn": kn,
        "vb": vb, "vh": vh, "vn": vn, "scale": scale,
    }  # fmt: skip
    # Triton launches on the current device, wherever its arguments lie.
    with torch.cuda.device_of(w):
        launch(
            attend,
            (b * h, -(-n_q // rows), 1),
            tensors,
            numbers,
            _attention_options(seen is not None, d, e, n_k, ATTENTION),
        )


@functools.cache
def _attention_options(padded: bool, d: int, e: int, n_k: int, settings: tuple[int, int, int]) -> Options:
    rows, warps, most = settings
    one = n_k <= most
    keys = max(16, triton.next_power_of_2(n_k)) if one else 64
    wide = {"D": max(16, triton.next_power_of_2(d)), "E": max(16, triton.next_power_of_2(e))}
    tiles = {"BM": rows, "BK": keys, "ONE": one}
    return tuple({"PADDED": padded, **wide, **tiles, "num_warps": warps, "num_stages": 1}.items())


def project_heads(
    w: Float[Tensor, "n h q k"],
    v: Float[Tensor, "n g k e"],
    output: Float[Tensor, "n h q e"] | None,
    visible: tuple[Int[Tensor, "b k"], Int[Tensor, " b"], Int[Tensor, "b k"]] | None,
    *,
    safe: float,
    independent: float,
) -> tuple[Float[Tensor, "n h q k"], Float[Tensor, "three n h"]]:
    """(W_perp, stats) of the items of several layers; weights and values at hidden keys are not read.

    ``visible`` is which keys are visible (1) in each of b inputs, how many, and the keys with those first; n is a
    multiple of b. Stats are |W_perp V - O| / |O| (0 without ``output``), the share of |W|^2 that is removed, and 1
    where a bound on the condition number of V leaves the result in doubt: it must be below ``safe`` where there are
    more keys than columns, and otherwise below ``independent``, so that W_perp is W.
    """
    n, h, n_q, n_k = w.shape
    g, e = v.shape[1], v.shape[3]
    v = v.float()
    if v.stride(-1) != 1:
        v = v.contiguous()
    w = w.contiguous()
    columns = torch.empty(n, g, n_k, e, device=v.device)
    conditions = torch.empty(n, g, device=v.device)
    projected, stats = torch.empty_like(w), torch.empty(3, n, h, device=w.device)
    padded, half = visible is not None, 16 if e <= 32 else 32
    # Without padding the kernels do not read the masks, and any tensor serves.
    seen, count, order = (conditions,) * 3 if visible is None else visible
    inputs, (vb, vh, vn, _) = len(seen), v.stride()
    values = {"n_k": n_k, "e": e, "vb": vb, "vh": vh, "vn": vn}
    over = w if output is None else output if output.stride(-1) == 1 else output.contiguous()
    ob, oh, on, _ = over.stride()
    with torch.cuda.device_of(w):
        launch(
            basis,
            (n * g, 1, 1),
            {"V": v, "Seen": seen, "Order": order, "Count": count, "Columns": columns, "Conditions": conditions},
            {"heads": g, "inputs": inputs, **values},
            _basis_options(padded, half, BASIS),
        )
        launch(
            project,
            (n * h, 1, 1),
            {
                "W": w, "Columns": columns, "V": v, "Output": over, "Seen": seen, "Count": count,
                "Conditions": conditions, "Projected": projected, "Stats": stats,
            },
            {
                "heads": h, "groups": h // g, "inputs": inputs, "n_q": n_q, "ob": ob, "oh": oh, "on": on, **values,
                "safe": safe, "independent": independent,
            },
            _projection_options(padded, output is not None, half, n_q, PROJECTION),
        )  # fmt: skip
    return projected, stats


@functools.cache
def _basis_options(padded: bool, half: int, settings: tuple[int, int]) -> Options:
    keys, warps = settings
    return tuple({"PADDED": padded, "H": half, "BK": keys, "num_warps": warps, "num_stages": 1}.items())


@functools.cache
def _projection_options(padded: bool, known: bool, half: int, n_q: int, settings: tuple[Any, ...]) -> Options:
    keys, stages, short, long = settings
    rows, warps = short if n_q <= short[0] else long
    constants = {"PADDED": padded, "KNOWN": known, "E": 2 * half, "BM": rows, "BK": keys}
    return tuple({**constants, "num_warps": warps, "num_stages": stages}.items())
